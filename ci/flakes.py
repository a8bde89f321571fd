"""Run tests of `make test` five times each beside two busy processes; one failure is a failure.

    python -m ci.flakes --seed 7                 200 of them, drawn by this seed
    python -m ci.flakes --seed 7 --minutes 3     as many of these as begin within three minutes

The tests are run in batches, each batch so many times in processes of its own. Nothing is run again
because it has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Final
from xml.etree import ElementTree

from ci.parts import FLAKES_DRAWN, MAYBE, OF_EXTRAS

ROOT: Final = Path(__file__).parents[1]
REPORTS: Final = ROOT / "build" / "flakes"
TIMES: Final = 5
BUSY: Final = 2
BATCH: Final = 40
PYTEST: Final = (sys.executable, "-m", "pytest", "-p", "ci.plugin", "-p", "no:cacheprovider")


def collected(words: Sequence[str]) -> list[str]:
    """Return the ids of the tests that `make test` runs, but for those of the extras."""
    ignored = [f"--ignore={test}" for test in OF_EXTRAS]
    done = subprocess.run(
        [*PYTEST, "--collect-only", "-q", *ignored, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return list(takewhile(bool, done.stdout.splitlines()))  # what follows is a summary


def drawn(ids: Sequence[str], number: int, seed: int) -> list[str]:
    """Return some of the tests, each equally likely, in the order of their draw."""
    return Random(seed).sample(sorted(ids), min(number, len(ids)))


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Have processes meanwhile that compute without end."""
    code = "while True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(ids: Sequence[str], name: str) -> set[str]:
    """Run tests once; returns the names of those that failed, or all if pytest itself did."""
    junit, chosen = REPORTS / f"{name}.xml", REPORTS / f"{name}.txt"
    junit.unlink(missing_ok=True)
    chosen.write_text("\n".join(ids), encoding="utf-8")
    done = subprocess.run(
        [*PYTEST, "-q", "-n", "2", "--no-skips", *MAYBE, "--junitxml", str(junit), f"@{chosen}"],
        cwd=ROOT,
        check=False,
    )
    failed = failures(junit) if junit.is_file() else set()
    return failed or (set(ids) if done.returncode else set())


def failures(junit: Path) -> set[str]:
    """Return the tests that a report names as failed, by file and name."""
    return {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '')}"
        for case in ElementTree.parse(junit).iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    }


def main(arguments: Sequence[str]) -> int:
    """Run the draw, and name the tests that failed; 1 where there are any."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.flakes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, required=True, help="of the draw")
    parser.add_argument("--draw", type=int, default=FLAKES_DRAWN, metavar="N", help="so many tests")
    parser.add_argument("--times", type=int, default=TIMES, metavar="N", help="run each N times")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for what begins")
    args, words = parser.parse_known_args(arguments)
    REPORTS.mkdir(parents=True, exist_ok=True)
    began, failed, count = time.monotonic(), set[str](), 0
    ids = drawn(collected(words), args.draw, args.seed)
    with busy_processes(BUSY):
        for place in range(0, len(ids), BATCH):
            spent = time.monotonic() - began
            # The next batch takes as long as those before it, in the mean.
            if place and spent + spent / (place / BATCH) > 60 * args.minutes:
                break
            batch = ids[place : place + BATCH]
            count += len(batch)
            for turn in range(args.times):
                print(f"\n=== tests {place + 1} to {count}, turn {turn + 1}", flush=True)
                failed |= run(batch, f"{place}-{turn}")
    print("".join(f"\nfailed: {name}" for name in sorted(failed)))
    left = f"; {len(ids) - count} were drawn that no time was left for" if count < len(ids) else ""
    print(f"{count - len(failed)} of {count} tests passed {args.times} times{left}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
