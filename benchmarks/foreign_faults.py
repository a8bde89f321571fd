"""Put faults into other systems, and run the same systems without: count what `prove` names.

    python -m benchmarks.foreign_faults --page docs/records/foreign-faults.md

needs what `benchmarks.other_trainers` needs, but for DeepSpeed. `--only TEXT` for the systems whose
name has a text, `--out FILE` for the rows as JSON lines; a file with rows is continued. It fails if
a fault passes, or a case is accused that nothing is known to be wrong with.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.other_trainers import outcome, read, run_cases
from benchmarks.other_trainers_cases import case, cases, is_healthy
from benchmarks.seeded_faults import FAULTS

HEAD = """\
# Faults in other systems

`python -m benchmarks.foreign_faults --page docs/records/foreign-faults.md` writes this page.

Two steps of a small random model on two or four ranks of CPU processes (gloo, fp32), compared by
[`prove`](../guides/is-my-training-right.md). "Named" is the kind of the first fault of the verdict.
"""
SEEDED = """\

## With a fault

Each is put into a system's own objects or functions before the first step.
`tests/seeded_trainers.py` has more, on torch's engines.

| system | model | layout | microbatches | fault | kind | named |
|---|---|---|--:|---|---|---|
"""
HEALTHY = """\

## Without

Cases of [the table of other systems](../others.md): all but DeepSpeed's, which compiles, those of
transformers on four ranks with one microbatch, and those that `prove` finds wrong in these
versions: norms of heads in transformers' tp with two microbatches, apertus and glm4_moe in its tp,
and torchtitan's DDP. A script without Meshwright shows the first for qwen3; nothing but `prove`
shows the other families.

| system | layout | microbatches | right | accused | not compared, or raises |
|---|---|--:|---|---|---|
"""


def asked(only: str = "") -> list[dict[str, Any]]:
    """Return the cases of the worker: one for each fault, and those without."""
    seeded = [
        {**case(f.system, f.family, f.layout, f.microbatches, f.ranks), "seeded": name}
        for name, f in FAULTS.items()
    ]
    healthy = [one for one in cases() if is_healthy(one) and not _is_slow(one)]
    return [one for one in seeded + healthy if only in one["system"]]


def _is_slow(case: dict[str, Any]) -> bool:
    """Whether a case compiles, or is one of many on four ranks."""
    is_of_many = case["system"] == "transformers" and case["ranks"] > 2
    return case["system"] == "deepspeed" or (is_of_many and case["microbatches"] == 1)


def named(row: dict[str, Any]) -> str:
    """Return the kind of the first fault that a row names, or why there is none."""
    if "crashed" in row:
        return f"raises: {row['crashed'].splitlines()[0][:80]}"
    verdict = row["verdict"]
    if verdict["refused"]:
        return f"refused: {verdict['refused'][:80]}"
    return verdict["faults"][0]["kind"] if verdict["faults"] else "nothing"


def is_accused(row: dict[str, Any]) -> bool:
    """Whether a verdict names a fault."""
    return bool(row.get("verdict", {}).get("faults"))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many faults are named, and how many right cases are accused."""
    seeded, healthy = _parts(rows)
    right = sum(named(row) == FAULTS[row["seeded"]].kind for row in seeded)
    compared = [row for row in healthy if row.get("verdict", {}).get("refused", "") is None]
    return (
        f"{right} of {len(seeded)} faults are named with their kind, and "
        f"{sum(named(row) == 'nothing' for row in seeded)} pass. "
        f"{sum(map(is_accused, compared))} of {len(compared)} cases without a fault are accused; "
        f"{len(healthy) - len(compared)} more raise or are not compared.\n"
    )


def has_failed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a fault passes, or a case without one is accused."""
    seeded, healthy = _parts(rows)
    return any(named(row) == "nothing" for row in seeded) or any(map(is_accused, healthy))


def page(rows: Sequence[dict[str, Any]], when: str) -> str:
    """Return the page of all rows; `when` says of which run they are."""
    seeded, healthy = _parts(rows)
    systems = dict.fromkeys(row["system"] for row in [*seeded, *healthy])
    versions = ", ".join(f"{system} {version(system)}" for system in systems)
    lines = [HEAD, f"{when} {versions}.\n", summary(rows)]
    return "\n".join(lines) + SEEDED + _seeded(seeded) + HEALTHY + _healthy(healthy)


def _parts(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows with a fault that is still there, and those without."""
    return (
        [row for row in rows if row.get("seeded") in FAULTS],
        [row for row in rows if "seeded" not in row],
    )


def _layout(row: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in row["layout"].items())


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |\n"


def _seeded(rows: Sequence[dict[str, Any]]) -> str:
    """Return the lines of the table of faults."""
    return "".join(
        _line(
            *(row["system"], row["family"], _layout(row), str(row["microbatches"])),
            *(row["seeded"].split(": ")[-1], FAULTS[row["seeded"]].kind, named(row)),
        )
        for row in rows
    )


def _healthy(rows: Sequence[dict[str, Any]]) -> str:
    """Return the lines of the table without faults, one for each system and layout."""
    groups = dict[tuple[str, str, str], list[dict[str, Any]]]()
    for row in rows:
        key = row["system"], _layout(row), str(row["microbatches"])
        groups.setdefault(key, []).append(row)
    lines = []
    for key, some in groups.items():
        cells = dict[str, list[str]](right=[], accused=[], other=[])
        for row in some:
            text, family = outcome(row), row["family"]
            if text.startswith("right"):
                cells["right"].append(family)
            else:
                kind = "accused" if is_accused(row) else "other"
                cells[kind].append(f"{family}: {text}")
        lines.append(_line(*key, *("; ".join(cell) for cell in cells.values())))
    return "".join(lines)


def main() -> int:
    """Run the cases that are asked for, print the counts, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("build/foreign-faults.jsonl"))
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    before, start = read(args.out), time.monotonic()
    left = [one for one in asked(args.only) if not any(_is_of(row, one) for row in before)]
    for system, ranks in dict.fromkeys((one["system"], one["ranks"]) for one in left):
        some = [one for one in left if (one["system"], one["ranks"]) == (system, ranks)]
        run_cases(some, ranks, args.out)
    minutes = (time.monotonic() - start) / 60
    day = datetime.date.today().isoformat()
    when = "Of several runs." if before else f"One run of {day}, {minutes:.0f} minutes."
    rows = read(args.out)
    print(summary(rows) + SEEDED + _seeded(_parts(rows)[0]) + HEALTHY + _healthy(_parts(rows)[1]))
    if args.page is not None:
        args.page.write_text(page(rows, when))
    return int(has_failed(rows))


def _is_of(row: dict[str, Any], case: dict[str, Any]) -> bool:
    """Whether a row is of a case."""
    keys = ("system", "family", "layout", "microbatches", "seeded")
    return all(row.get(key) == case.get(key) for key in keys)


if __name__ == "__main__":
    raise SystemExit(main())
