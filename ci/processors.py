"""Run the tests of `make test` on emulated processors, one after the other, on this machine.

    python3 -m ci.processors --list               which there are, and which it cannot emulate
    python3 -m ci.processors zen3 --times 3       one of them, three times
    python3 -m ci.processors --all                all of them
    python3 -m ci.processors zen5 zen3 --first --share 3/20    the first that it can emulate
    python3 -m ci.processors zen3 -- tests/parallel/test_loss.py -x     other words for pytest

A processor is emulated by what libraries and the code ask for: variables that limit the
instructions of torch, oneDNN and MKL; /proc/cpuinfo with its vendor, family, cache and flags, in a
mount namespace; and the cores that are visible. CPUID stays the real one: MKL sees the real vendor.
Before the tests, a process of that environment, and a rank that the tests fork, say what they see.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ci.counts import Counts, count
from ci.parts import MAYBE
from ci.processor_table import TABLE, Processor
from ci.running import columns

ROOT: Final = Path(__file__).parents[1]
CPUINFO: Final = Path("/proc/cpuinfo")
MORE_CORES: Final = ROOT / "ci" / "visible_cores" / "sitecustomize.py"
REPORTS: Final = ROOT / "build" / "processors"


@dataclass(frozen=True)
class Run:
    """What came of the tests on a processor; `outcome` is passed, failed or left out."""

    name: str
    outcome: str
    counts: Counts
    seconds: float


@dataclass(frozen=True)
class Emulated:
    """The environment of a processor, made of files in a folder; `python` runs the tests in it."""

    processor: Processor
    folder: Path
    python: Path

    def write(self, real: str) -> None:
        """Write what takes the place of /proc/cpuinfo, the `real` one, and what shows cores."""
        self.folder.mkdir()
        (self.folder / "cpuinfo").write_text(self.processor.cpuinfo(real), encoding="utf-8")
        if self.processor.cores > self.workers:
            (self.folder / "cores").write_text(str(self.processor.cores), encoding="utf-8")
            shutil.copy(MORE_CORES, self.folder)

    @property
    def workers(self) -> int:
        """Processes that share the tests: one for each core that is visible and real."""
        return min(self.processor.cores, len(os.sched_getaffinity(0)))

    @property
    def environ(self) -> dict[str, str]:
        """The variables of processes on this processor."""
        unlimited = ("ATEN_", "ONEDNN_", "DNNL_", "MKL_", "PYTHONDONTWRITEBYTECODE")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(unlimited)}
        folders = [self.folder, ROOT / "src", ROOT / "tests"]
        more = [one for one in [environ.get("PYTHONPATH")] if one]
        environ["PYTHONPATH"] = os.pathsep.join([*map(str, folders), *more])
        return environ | self.processor.environ

    def command(self, *words: str) -> list[str]:
        """Return the command that runs Python with such words on this processor."""
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: self.workers]))
        mounted = f'mount --bind "$0" {CPUINFO} && exec "$@"'
        inside = ["sh", "-c", mounted, str(self.folder / "cpuinfo"), "taskset", "--cpu-list", cores]
        return ["unshare", "--mount", *inside, str(self.python), *words]

    def check(self) -> str:
        """Return what its processes see in words. Raises `SystemExit` if it is another's."""
        done = subprocess.run(
            self.command("-m", "ci.seen_processor"),
            cwd=ROOT,
            env=self.environ,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{self.processor.name}: no process could be started on it, see above")
        seen = json.loads(done.stdout.splitlines()[-1])
        real = Processor.vendor_of(CPUINFO.read_text(encoding="utf-8"))
        for place, facts in seen.items():
            if wrong := self.processor.differences(facts, real):
                raise SystemExit(f"{self.processor.name}, {place}: {'; '.join(wrong)}")
        if not seen["rank"]["is_forked"]:
            raise SystemExit(f"{self.processor.name}: tests start its ranks anew, they do not fork")
        return ", ".join(f"{key} {value}" for key, value in seen["rank"].items())


def emulation_problem() -> str | None:
    """Return why this machine emulates no processors; None if it does."""
    if not sys.platform.startswith("linux") or not CPUINFO.is_file():
        return "processors are emulated on Linux alone"
    if not Processor.vendor_of(CPUINFO.read_text(encoding="utf-8")):
        return "processors are emulated on x86 alone"
    for tool in ("unshare", "taskset", "mount"):
        if shutil.which(tool) is None:
            return f"processors are emulated by {tool}, of Debian's util-linux and mount"
    tried = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"mount --bind /dev/null {CPUINFO}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        what = "another /proc/cpuinfo needs root and the right to mount (CAP_SYS_ADMIN)"
        return f"{what}: {tried.stderr.strip()}"
    return None


def run(emulated: Emulated, words: Sequence[str], turn: int) -> Run:
    """Run tests on a processor."""
    name = emulated.processor.name
    junit = REPORTS / f"{name}-{turn}.xml"
    junit.parent.mkdir(parents=True, exist_ok=True)
    junit.unlink(missing_ok=True)
    began = time.monotonic()
    done = subprocess.run(
        emulated.command(
            *("-m", "pytest", "-p", "ci.plugin", "--no-skips", *MAYBE),
            *("-n", str(emulated.workers), "--junitxml", str(junit), *words),
        ),
        cwd=ROOT,
        env=emulated.environ,
        check=False,
    )
    counts = count(done.returncode, junit, "")
    outcome = "failed" if counts.failed else "passed"
    return Run(name, outcome, counts, time.monotonic() - began)


def table(runs: Sequence[Run]) -> str:
    """Return a line for each run, and closing lines with the sums."""
    rows = [["processor", "outcome", "seconds", "passed", "failed", "skipped"]]
    rows += [[one.name, one.outcome, f"{one.seconds:.0f}", *map(str, one.counts)] for one in runs]
    passed, failed = sum(x.counts.passed for x in runs), sum(x.counts.failed for x in runs)
    return f"{columns(rows)}\n\n{passed} of {passed + failed} tests passed"


def main(arguments: Sequence[str]) -> int:
    """Run the tests on the processors that are named; 1 where one of them fails."""
    parser = argparse.ArgumentParser(
        prog="python3 -m ci.processors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TABLE))
    parser.add_argument("--all", action="store_true", help="all of the table")
    parser.add_argument("--first", action="store_true", help="the first that can be emulated alone")
    parser.add_argument("--list", action="store_true", help="print the table, run nothing")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="run each N times")
    parser.add_argument("--share", metavar="K/N", help="the K-th of every N tests")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv/bin/python", metavar="PYTHON")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:cut])
    real = CPUINFO.read_text(encoding="utf-8") if CPUINFO.is_file() else ""
    lacking = {name: " ".join(one.lacking(real)) for name, one in TABLE.items()}
    if args.list:
        for name, missing in lacking.items():
            print(name, f"(not here: the processor has no {missing})" if missing else "")
        return 0
    names = list(TABLE) if args.all else args.names
    if unknown := [one for one in names if one not in TABLE]:
        parser.error(f"no processor is called {unknown[0]}; there are: {', '.join(TABLE)}")
    if not names:
        parser.error("name a processor, or --all")
    if problem := emulation_problem():
        raise SystemExit(problem)
    if args.first:
        names = [one for one in names if not lacking[one]][:1]
    elif not args.all and (absent := [one for one in names if lacking[one]]):
        raise SystemExit(f"{absent[0]}: the real processor has no {lacking[absent[0]]}")
    words = [*(["--share", args.share] if args.share else []), *arguments[cut + 1 :]]
    runs = list[Run]()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if lacking[name]:
                print(f"\n=== {name}: left out, the real processor has no {lacking[name]}")
                runs.append(Run(name, "left out", Counts(), 0.0))
                continue
            emulated = Emulated(TABLE[name], Path(folder) / name, args.python.absolute())
            emulated.write(real)
            print(f"\n=== {name}: a rank sees {emulated.check()}", flush=True)
            runs += [run(emulated, words, turn + 1) for turn in range(args.times)]
    print(f"\n{table(runs)}", flush=True)
    return int(any(one.outcome == "failed" for one in runs))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
