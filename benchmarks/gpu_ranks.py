"""Prove layouts of several ranks on one GPU.

    python -m benchmarks.gpu_ranks [--ranks N] [--minutes M] [--out FILE.jsonl] [--only TEXT]

NCCL refuses two ranks on one GPU: here their messages go through the host (`benchmarks.staged`).
All else is as with a GPU for each rank: kernels, streams, FSDP2, compiled blocks. Several sets of
ranks take cases in turns. A set in which a rank raises, ends or hangs is replaced by a new one.
Layouts that passed in an earlier run, according to FILE.jsonl, are skipped.
`--device cpu` does the same without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from benchmarks.gpu_ranks_cases import NUMBERS, Chosen, chosen
from benchmarks.gpu_ranks_set import RankSet
from meshwright.prove.outcome import Outcome
from meshwright.prove.verdict import Verdict
from meshwright.units import format_seconds

# Seconds after which a case hangs, unless `--limit` says so; and how many more compilers may take.
LIMIT_S: Final = 40.0
COMPILING_S: Final = 110.0
# Processor cores for each rank of a set: of four, two compute what one device does, as of two.
_CORES: Final = {2: 1.25, 4: 2.0}
# Lines of a traceback that are printed; `--out` has more.
_SHOWN: Final = 6
# Characters of a printed line: a verdict may list many differences.
_WIDTH: Final = 300


class Tally:
    """Cases that wait for their turn, and what has become of the others."""

    def __init__(self, cases: Mapping[int, list[Chosen]], ends: float, out: TextIO | None) -> None:
        self._waiting = {world: deque(some) for world, some in cases.items()}
        self._lock, self._out = threading.Lock(), out
        self.ends, self.counts = ends, Counter[str]()

    def next(self, world: int) -> Chosen | None:
        """Return the next case of so many ranks; None if there is none, or no time."""
        with self._lock:
            waiting = self._waiting[world]
            return waiting.popleft() if waiting and time.monotonic() < self.ends else None

    @property
    def left(self) -> int:
        """How many cases had no turn."""
        return sum(map(len, self._waiting.values()))

    def add(self, one: Chosen, found: Mapping[str, Any], seconds: float) -> None:
        """Print what was found of a case, and write it."""
        verdicts = tuple(Verdict.from_dict(values) for values in found.get("verdicts", ()))
        outcome = Outcome(one.case, verdicts, seconds)
        word = "ok" if outcome.passed else "WRONG" if verdicts else "FAILED"
        word = "cut" if found.get("no time") else word
        good = sum(verdict.passed for verdict in verdicts)
        world = one.case.layout.world
        lines = [f"{word:6} {world}r {good}/{len(verdicts)} {seconds:.1f}s {one.name}"]
        lines += list(outcome.lines())[1:]
        if word == "FAILED":
            lines += [f"     {line}" for line in (found["raised"], *found["told"][-_SHOWN:])]
        row = {"case": one.name, "ranks": world, "found": word, "seconds": round(seconds, 2)}
        with self._lock:
            self.counts[word] += 1
            print("\n".join(line[:_WIDTH] for line in lines), flush=True)
            if self._out is not None:
                row |= {**found, "repeat": json.loads(one.case.as_json())}
                print(json.dumps(row), file=self._out, flush=True)


def work(tally: Tally, device: str, world: int, limit_s: float) -> None:
    """Have sets of ranks prove cases until none is left or the time is up."""
    ranks: RankSet | None = None
    while (one := tally.next(world)) is not None:
        ranks = ranks or RankSet(device, world)
        began = time.monotonic()
        found = unable = ranks.started(tally.ends)
        if not unable:
            began = time.monotonic()
            limit = limit_s + (COMPILING_S if one.compiles else 0)
            found = ranks.prove(one.case, limit, tally.ends)
        if "raised" in found:
            ranks.close()
            ranks = None
        tally.add(one, found, time.monotonic() - began)
        if unable:  # neither would others start
            return
    if ranks is not None:
        ranks.close()


def passed(path: Path) -> set[tuple[int, str]]:
    """Return the ranks and names of the cases that passed, as an earlier run wrote them."""
    if not path.is_file():
        return set()
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["ranks"], row["case"]) for row in rows if row["found"] == "ok"}


def _threads(tally: Tally, args: argparse.Namespace, worlds: list[int]) -> list[threading.Thread]:
    cores = len(os.sched_getaffinity(0))
    threads = []
    for world in worlds:
        sets = args.sets or max(1, int(cores / len(worlds) / world / _CORES[world]))
        for _ in range(sets):
            words = (tally, args.device, world, args.limit)
            threads.append(threading.Thread(target=work, args=words))
    return threads


def main() -> int:
    """Prove what there is time for; 1 where a layout is wrong or has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, choices=sorted(NUMBERS), help="default: all of these")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--out", type=Path, metavar="FILE.jsonl", help="append a row for each layout"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="labels that contain it")
    parser.add_argument("--sets", type=int, help="of each number of ranks, at once")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a case")
    args = parser.parse_args()
    started = time.monotonic()
    worlds = sorted(NUMBERS) if args.ranks is None else [args.ranks]
    done = passed(args.out) if args.out else set()
    cases = {
        world: [
            one for one in chosen(world) if args.only in one.name and (world, one.name) not in done
        ]
        for world in worlds
    }
    out = args.out.open("a", encoding="utf-8") if args.out else None
    tally = Tally(cases, started + 60 * args.minutes, out)
    threads = _threads(tally, args, worlds)
    print(f"{tally.left} layouts, {len(threads)} sets of ranks", flush=True)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = tally.counts
    bad = counts["WRONG"] + counts["FAILED"]
    print(
        f"{counts['ok']} of {counts['ok'] + bad} layouts passed, {counts['WRONG']} WRONG, "
        f"{counts['FAILED']} FAILED, {tally.left + counts['cut']} left out, "
        f"in {format_seconds(time.monotonic() - started)}"
    )
    if out is not None:
        out.close()
    return 1 if bad or not counts["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
