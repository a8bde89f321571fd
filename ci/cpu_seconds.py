"""A pytest plugin that says how many seconds of CPU time each test takes, with its processes.

    python -m pytest -p ci.cpu_seconds                            files and tests that take most
    python -m pytest -p ci.cpu_seconds --cpu-seconds after.json   writes the seconds of each test
    python -m ci.cpu_seconds after.json --before before.json      compares two runs by file

CPU time depends less than wall time on what else the machine does. A test's seconds are those
that pytest and all processes below it took from the end of the test before: its fixtures, and its
share of what it starts for others (the first test of a file starts the file's ranks). Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

SHOWN: Final = 10
PROPERTY: Final = "cpu_s"
COLLECTION: Final = "(imports and collection)"
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    group = parser.getgroup("cpu seconds", "CPU time of tests")
    group.addoption("--cpu-seconds", type=Path, metavar="FILE", help="write each test's seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in the process that runs tests, and count in the one that reports."""
    config.pluginmanager.register(_Times(config.getoption("cpu_seconds")), "cpu seconds of tests")


class _Times:
    def __init__(self, file: Path | None) -> None:
        self.file, self.last_s = file, 0.0
        self.seconds, self.imports = defaultdict[str, float](float), defaultdict[str, float](float)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        began_s = time.process_time()
        yield
        if isinstance(collector, pytest.Module):
            self.imports[collector.nodeid] += time.process_time() - began_s

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.last_s = tree_seconds()
        self.seconds[COLLECTION] += self.last_s
        output = getattr(session.config, "workeroutput", None)
        if output is not None:  # of a process of xdist; empty at first
            output[PROPERTY] = self.last_s

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = (yield).get_result()
        now_s = tree_seconds()
        report.user_properties = [*report.user_properties, (PROPERTY, now_s - self.last_s)]
        self.last_s = now_s

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        self.seconds[report.nodeid] += float(properties.get(PROPERTY, 0.0))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.seconds[COLLECTION] += getattr(node, "workeroutput", {}).get(PROPERTY, 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("CPU seconds")
        for line in _lines(self.seconds, self.imports):
            terminalreporter.write_line(line)
        if self.file is not None:
            self.file.write_text(json.dumps(self.seconds, indent=0))


def tree_seconds() -> float:
    """Return the seconds of CPU time of this process and those below it, ended ones included."""
    return sum(map(_seconds, _tree(os.getpid()))) * TICK_S


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from _tree(int(child))
    except OSError:  # has ended meanwhile
        return


def _seconds(pid: int) -> int:
    """Return the ticks of a process and of its children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime of proc(5)


def by_file(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each file."""
    total = defaultdict[str, float](float)
    for test, test_s in seconds.items():
        total[test.partition("::")[0]] += test_s
    return total


def _lines(seconds: Mapping[str, float], imports: Mapping[str, float]) -> Iterator[str]:
    yield f"{sum(seconds.values()):8.1f} in all"
    kinds = {"file": by_file(seconds), "test": seconds, "file, to collect": imports}
    for title, of_kind in kinds.items():
        yield f"by {title}:"
        for name in sorted(of_kind, key=lambda name: -of_kind[name])[:SHOWN]:
            yield f"{of_kind[name]:8.1f} {name}"


def _compared(
    before: Mapping[str, float], after: Mapping[str, float], number: int
) -> Iterator[str]:
    yield "| file | before | after |"
    yield "|---|--:|--:|"
    pairs = {file: (before.get(file, 0.0), after.get(file, 0.0)) for file in {**before, **after}}
    largest = sorted(pairs, key=lambda file: -max(pairs[file]))
    for file in largest[:number]:
        yield "| {} | {:.1f} | {:.1f} |".format(file.removeprefix("tests/"), *pairs[file])
    yield f"| all | {sum(before.values()):.1f} | {sum(after.values()):.1f} |"


def _read(files: Sequence[Path]) -> dict[str, float]:
    """Return the seconds of each file of tests in the pieces of a run."""
    total = defaultdict[str, float](float)
    for piece in files:
        for test, test_s in json.loads(piece.read_text()).items():
            total[test] += test_s
    return by_file(total)


def main() -> None:
    """Print what runs took, by file: `python -m ci.cpu_seconds FILE... [--before FILE...]`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--before", nargs="+", type=Path, default=[])
    parser.add_argument("--number", type=int, default=30, help="of files")
    words = parser.parse_args()
    before, after = _read(words.before), _read(words.files)
    print(*_compared(before, after, words.number), sep="\n")


if __name__ == "__main__":
    main()
