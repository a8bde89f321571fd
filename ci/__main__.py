"""Run what CI runs for a commit: `python3 -m ci`, or all of it: `python3 -m ci --everything`.

Turns and draws follow from the commit's hash, so that each commit checks something else, a commit
the same each time, and a few of them all. Output and reports are kept in build/ci.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ci.parts import Part, everything, of_commit
from ci.running import Budget, adopt_orphans, run_all, table
from ci.turns import head

ROOT: Final = Path(__file__).parents[1]
# A commit's minutes: optional parts start while they last; none outlives the second. One minute
# less than the 45 that a change may take, since a part that starts in time may end late.
SOFT: Final = 44
HARD: Final = 85
# `everything` has no one waiting for it.
HOURS: Final = 12


def main(arguments: Sequence[str]) -> int:
    """Run the parts and print their table; 1 where one of them is not good."""
    parser = argparse.ArgumentParser(prog="python3 -m ci", description=__doc__)
    parser.add_argument("--everything", action="store_true", help="all parts, whole")
    parser.add_argument("--commit", metavar="HASH", help="whose turns and draws (default: HEAD)")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="these parts alone")
    parser.add_argument("--without", nargs="+", default=[], metavar="PART", help="all but these")
    parser.add_argument("--list", action="store_true", help="print the parts, run nothing")
    args = parser.parse_args(arguments)
    commit = args.commit or head(ROOT)
    every = everything(commit) if args.everything else of_commit(commit)
    parts = chosen(every, args.only, args.without)
    print(f"commit {commit}: {len(parts)} parts, some {sum(p.minutes for p in parts):.0f} minutes")
    for part in parts:
        need = "" if part.is_required else "  while there is time"
        print(f"  {part.name:<18}{part.minutes:>5g} min  {part.why}{need}".rstrip())
    if args.list:
        return 0
    minutes = (HOURS * 60, HOURS * 60) if args.everything else (SOFT, HARD)
    adopt_orphans()
    folder = ROOT / "build" / "ci"
    shutil.rmtree(folder, ignore_errors=True)
    results = run_all(parts, folder, Budget(*(60.0 * one for one in minutes)))
    print(f"\n{table(results)}", flush=True)
    return int(not all(one.is_good for one in results))


def chosen(parts: Sequence[Part], only: Sequence[str], without: Sequence[str] = ()) -> list[Part]:
    """Return the parts with these names, or all, but for some.

    Raises `SystemExit` for an unknown name.
    """
    known = [part.name for part in parts]
    if unknown := sorted({*only, *without} - set(known)):
        raise SystemExit(f"no part is called {', '.join(unknown)}; there are: {', '.join(known)}")
    return [part for part in parts if (not only or part.name in only) and part.name not in without]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
