"""Prove layouts of two ranks for hours, and count crashes: `python -m benchmarks.soak`.

Half of the layouts come from the table of two ranks (ZeRO 1 to 3, FSDP2, offload, bf16, experts,
...), half are drawn at random. Each check has its own processes:

- plain: as `meshwright prove` runs;
- glibc: every free checks the chunk (glibc's malloc_debug), and freed memory is overwritten;
- guard: each allocation has pages of its own (`guard.c`), some 10 times slower.

A rank that crashes leaves the C++ stacks of all its threads; they are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from meshwright.prove.case import Case
from meshwright.prove.draw import draw
from meshwright.prove.matrix import matrix
from meshwright.prove.outcome import Outcome
from meshwright.runtime.proofs.proof import CLAIM, prove_cases

GUARD: Final = Path(__file__).with_name("guard.c")
CHECKS: Final = ("plain", "glibc", "guard")
# The guard needs two mappings for each live allocation.
MAPPINGS: Final = 4_000_000
AT_A_TIME: Final = 32


@dataclass
class Result:
    """What came of the layouts proven under a check."""

    check: str
    layouts: int = 0
    failed: int = 0
    crashes: int = 0
    seconds: float = 0.0
    texts: list[str] = field(default_factory=list)

    @property
    def at_most(self) -> float:
        """Crashes per 1,000 layouts that 95% of such soaks would have seen: the rule of three."""
        return 1000 * 3 / self.layouts if self.layouts else float("inf")


def environ_of(check: str, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of ranks under a check; builds what it needs in a folder."""
    found = {**environ, "OMP_NUM_THREADS": "1"}
    if check == "glibc":
        found["GLIBC_TUNABLES"] = "glibc.malloc.check=3:glibc.malloc.perturb=165"
        found["LD_PRELOAD"] = "libc_malloc_debug.so.0"
    if check == "guard":
        library = folder / "guard.so"
        words = ("cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(GUARD), "-ldl")
        subprocess.run(words, check=True)
        allow_mappings()
        found["LD_PRELOAD"] = str(library)
    return found


def allow_mappings() -> None:
    """Let processes have as many mappings as the guard needs; raises `SystemExit` if refused."""
    limit = Path("/proc/sys/vm/max_map_count")
    if int(limit.read_text()) >= MAPPINGS:
        return
    try:
        limit.write_text(str(MAPPINGS))
    except OSError as error:
        command = f"sysctl -w vm.max_map_count={MAPPINGS}"
        raise SystemExit(f"the guard needs more mappings ({error.strerror}): {command}") from None


def cases_of(seed: int) -> list[Case]:
    """Return the next layouts of a seed, in random order."""
    chooser = random.Random(seed)
    table = [case for case in matrix(2) if case.refused is None]
    return chooser.sample(
        [*chooser.sample(table, AT_A_TIME // 2), *draw(seed, AT_A_TIME // 2, (2,))], AT_A_TIME
    )


def soak(check: str, minutes: float, seed: int) -> Result:
    """Prove layouts under a check for some minutes."""
    result, began = Result(check), time.monotonic()

    def count(outcome: Outcome) -> None:
        result.layouts += 1
        result.failed += not outcome.passed
        for verdict in outcome.verdicts:
            if verdict.claim == CLAIM and not verdict.passed:  # its ranks did not end
                result.crashes += 1
                result.texts.append(str(verdict.observed))
                print(verdict.observed, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        environ = environ_of(check, Path(folder), os.environ)
        while (left := 60 * minutes - (time.monotonic() - began)) > 0:
            prove_cases(cases_of(seed), environ, count, seconds=left)
            seed += 1
    result.seconds = time.monotonic() - began
    return result


def main(arguments: Sequence[str]) -> int:
    """Run the checks in turn and print a table; 1 if a layout crashed or failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="for each check")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    args = parser.parse_args(arguments)
    print("| check | layouts | failed | crashes | 95%: at most, of 1,000 | layouts a minute |")
    print("|---|--:|--:|--:|--:|--:|", flush=True)
    results = []
    for check in args.checks:
        result = soak(check, args.minutes, args.seed)
        results.append(result)
        rate = 60 * result.layouts / result.seconds
        at_most = "" if result.crashes else f"{result.at_most:.2f}"
        columns = (check, result.layouts, result.failed, result.crashes, at_most, f"{rate:.0f}")
        print("| " + " | ".join(map(str, columns)) + " |", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
