"""`python -m benchmarks.mutants`: put each fault of the table into a copy; each must be caught."""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutants.killing import TIMEOUT_S, Answer, Place, Task, preload, run_all
from benchmarks.mutants.table import (
    TABLE,
    Mutant,
    Table,
    TableError,
    copy_of_source,
    put_into,
)

EXIT_SURVIVED, EXIT_UNUSABLE = 1, 2
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"


class Row(NamedTuple):
    """A mutant and what one of its killers found."""

    mutant: Mutant
    killer: str
    answer: Answer

    @property
    def is_caught(self) -> bool:
        """Whether a claim failed; a crash does not count."""
        return bool(self.answer.failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all mutants were caught, 1 if one was not, 2 if the table cannot be used."""
    args = _arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all children are ended, too
    try:
        table = Table.read(args.table)
        chosen = choose(table, args.only, args.draw, args.seed)
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            rows = judge(table, chosen, Path(folder), args.jobs, args.timeout)
    except TableError as error:
        print(error, file=sys.stderr)
        return EXIT_UNUSABLE
    missed = [row for row in rows if not row.is_caught]
    if args.page is not None:
        put_table(args.page, table, rows)
    mutants = {row.mutant.name for row in rows}
    left = {row.mutant.name for row in missed}
    print(f"{len(mutants) - len(left)} of {len(mutants)} mutants were caught")
    for row in missed:
        why = row.answer.error and f" ({row.answer.error})"
        print(f"NOT CAUGHT {row.mutant.name} by {row.killer}: {row.mutant.what}{why}")
    return EXIT_SURVIVED if missed else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="mutants whose names contain one of these"
    )
    parser.add_argument("--draw", type=int, metavar="N", help="N of them at random")
    parser.add_argument("--seed", default="0", help="of --draw: any text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument(
        "--page", type=Path, help="a page with the table: rows of these mutants are replaced"
    )
    return parser.parse_args(argv)


def choose(table: Table, only: Sequence[str] | None, draw: int | None, seed: str) -> list[Mutant]:
    """Return the chosen mutants; raises `TableError` if there are none."""
    found = [m for m in table.mutants.values() if not only or any(o in m.name for o in only)]
    if not found:
        raise TableError(f"no mutant has {only} in its name")
    if draw is not None and draw < len(found):
        found = random.Random(seed).sample(found, draw)
        print(f"drawn by seed {seed}: {', '.join(mutant.name for mutant in found)}")
    return found


def judge(
    table: Table, mutants: Sequence[Mutant], folder: Path, jobs: int, timeout_s: float
) -> list[Row]:
    """Run the killers without a mutant, where they must pass, then on each of their mutants.

    Raises `TableError` with the killers that fail without one, or for a mutant that no longer fits.
    """
    place, healthy = Place(folder / "place").make(), copy_of_source(folder / "healthy")
    trees = {mutant.name: _planted(mutant, folder) for mutant in mutants}
    preload()
    bad: list[str] = []

    def task(tree: Path, killers: Sequence[str], name: str) -> Task:
        commands = {killer: table.killers[killer] for killer in killers}
        return Task(tree, commands, place, folder / "answers" / name)

    def passed(_: Task, found: Mapping[str, Answer]) -> None:
        for name, one in found.items():
            is_bad = bool(one.failed or one.error)
            print(f"{'FAIL' if is_bad else 'ok  '} {name} ({one.seconds:.1f} s)", flush=True)
            if is_bad:
                bad.append(f"{name} fails without a mutant: {one.error or one.failed}")

    wanted = list(dict.fromkeys(name for mutant in mutants for name in mutant.killers))
    tasks = [task(healthy, [name], "healthy") for name in wanted]
    run_all(tasks[:1], 1, passed, timeout_s)  # alone: it compiles what the others read
    run_all(tasks[1:], jobs, passed, timeout_s)
    if bad:
        raise TableError("\n".join(bad))
    rows: dict[str, list[Row]] = {}

    def caught(task: Task, found: Mapping[str, Answer]) -> None:
        mutant = table.mutants[task.answers.name]
        rows[mutant.name] = [Row(mutant, killer, one) for killer, one in found.items()]
        for row in rows[mutant.name]:
            word = "caught  " if row.is_caught else "SURVIVED"
            told = row.answer.failed[0] if row.is_caught else row.answer.error
            where = f"{mutant.name} by {row.killer}"
            print(f"{word} {where}: {told} ({row.answer.seconds:.1f} s)", flush=True)

    run_all([task(trees[m.name], m.killers, m.name) for m in mutants], jobs, caught, timeout_s)
    return [row for mutant in mutants for row in rows[mutant.name]]


def _planted(mutant: Mutant, folder: Path) -> Path:
    tree = copy_of_source(folder / "trees" / mutant.name)
    put_into(mutant, tree)
    return tree


def page(table: Table, found: Mapping[tuple[str, str], tuple[str, str]]) -> str:
    """Return the table of mutants, and that of killers, in Markdown.

    `found` are the claim that failed and the seconds, by mutant and killer; only those of the table
    are taken, in its order.
    """
    lines = [
        "| mutant | what goes wrong | caught by | claim that failed | s |",
        "|---|---|---|---|--:|",
    ]
    used: dict[str, str] = {}
    for one in table.mutants.values():
        for killer in one.killers:
            if (one.name, killer) in found:
                told, seconds = found[one.name, killer]
                lines.append(f"| {one.name} | {one.what} | {killer} | {told} | {seconds} |")
                used[killer] = table.killers[killer]
    lines += ["", "| caught by | command |", "|---|---|"]
    lines += [f"| {name} | `{command}` |" for name, command in used.items()]
    return "\n".join(lines) + "\n"


def told_by(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Return what a page tells: the claim that failed and the seconds, by mutant and killer."""
    rows = (re.split(r"(?<!\\) \| ", line[2:-2]) for line in text.splitlines() if line[:2] == "| ")
    return {(row[0], row[2]): (row[3], row[4]) for row in rows if len(row) == 5}


def put_table(path: Path, table: Table, rows: Sequence[Row]) -> None:
    """Put rows between the two marks of a page, beside those of the table's other mutants there."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    found = told_by(old)
    for row in rows:
        told = (row.answer.failed or ("**survived**",))[0].replace("|", "\\|")
        found[row.mutant.name, row.killer] = told, f"{row.answer.seconds:.1f}"
    path.write_text(f"{before}{BEGIN}\n{page(table, found)}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
