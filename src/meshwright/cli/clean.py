"""`meshwright clean`: shows the disk usage of runs and prepared data, and removes them."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from meshwright.cli.common import add_json, print_json
from meshwright.errors import EXIT_CHECK_FAILED, EXIT_DONE, ConfigError
from meshwright.runtime.pricing.measured import user_cache
from meshwright.runtime.supervise.disk import (
    DiskEntry,
    DiskSelection,
    forget_gone,
    prepared_in,
    remove,
    runs_of,
)
from meshwright.units import format_bytes

EXAMPLE = """\
examples:
  meshwright clean                              what the runs in runs/ take
  meshwright clean --keep 5                     what would go if the newest five stayed
  meshwright clean --keep 5 --delete            remove it
  meshwright clean --older-than 30d --delete
  meshwright clean --caches --older-than 30d    prepared corpora and downloads

Nothing is removed without --delete, and nothing at all that is in use.
"""
_SECONDS: Final = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `clean` to the parser."""
    parser.description = (
        "Say what runs, or prepared corpora, take on the disk, and remove old ones."
    )
    parser.epilog = EXAMPLE
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", help="with runs in it (runs), or a cache"
    )
    parser.add_argument("--caches", action="store_true", help="prepared corpora and downloads")
    parser.add_argument("--keep", type=_count, metavar="N", help="the newest N stay")
    parser.add_argument(
        "--older-than", type=_age, metavar="AGE", help="what is younger stays: 12h, 30d, 8w"
    )
    parser.add_argument("--delete", action="store_true", help="remove what is listed to go")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List runs or caches, and with `--delete` remove the selected ones; returns the exit code."""
    choice = DiskSelection(args.keep, args.older_than)
    if args.delete and choice == DiskSelection():
        raise ConfigError("--delete removes what --keep N or --older-than AGE chooses: give one")
    folder = args.folder or (user_cache(os.environ) if args.caches else Path("runs"))
    entries = prepared_in(folder) if args.caches else runs_of(folder)
    selected = choice.of(entries)
    if not args.json:
        _list(entries, selected)
    problems = {}
    if args.delete:
        problems = {entry.path: problem for entry, problem in remove(selected) if problem}
        forget_gone(folder)
    if args.json:
        print_json(_as_json(entries, selected, problems, is_done=args.delete))
    else:
        for path, problem in problems.items():
            print(f"not removed: {path}: {problem}")
        gone = [entry for entry in selected if entry.path not in problems]
        print(_summary(entries, gone, chosen=choice != DiskSelection(), is_done=args.delete))
    return EXIT_CHECK_FAILED if problems else EXIT_DONE


def _list(entries: Sequence[DiskEntry], selected: Sequence[DiskEntry]) -> None:
    for entry in entries:
        fate = "in use" if entry.in_use else "remove" if entry in selected else "keep"
        user = f"; {entry.in_use}" if entry.in_use else ""
        size, age = format_bytes(entry.bytes), format_age(time.time() - entry.time)
        print(f"{fate:6}  {size:>10}  {age:>4}  {entry.path}  {entry.about}{user}")


def _summary(
    entries: Sequence[DiskEntry], selected: Sequence[DiskEntry], *, chosen: bool, is_done: bool
) -> str:
    total = format_bytes(sum(entry.bytes for entry in entries))
    if not chosen:
        return (
            f"{len(entries)} in all, {total}; --keep N or --older-than AGE selects what to remove"
        )
    selection = (
        f"{len(selected)} of {len(entries)}, {format_bytes(sum(entry.bytes for entry in selected))}"
    )
    if is_done:
        return f"removed {selection}"
    return f"would remove {selection} of {total}; with --delete it does"


def _as_json(
    entries: Sequence[DiskEntry],
    selected: Sequence[DiskEntry],
    problems: dict[Path, str],
    *,
    is_done: bool,
) -> dict[str, Any]:
    return {
        "entries": [
            {**entry._asdict(), "path": str(entry.path), "chosen": entry in selected}
            for entry in entries
        ],
        "removed": [str(o.path) for o in selected if is_done and o.path not in problems],
        "problems": {str(path): problem for path, problem in problems.items()},
    }


def format_age(seconds: float) -> str:
    """Return an age in its largest whole unit, such as 5m, 3h or 12d."""
    for unit in ("d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{seconds // _SECONDS[unit]:.0f}{unit}"
    return "0m"


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not an age: 90m, 12h, 30d or 8w")
    return int(match[1]) * _SECONDS[match[2]]


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text} is not a number of runs")
    return int(text)
