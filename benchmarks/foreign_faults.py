"""Put faults into other systems, and count how many `prove` names with the right kind.

    python -m benchmarks.foreign_faults --page docs/records/foreign-faults.md

needs what `benchmarks.other_trainers` needs. `--only TEXT` for the systems whose name has a text,
`--out FILE` for the rows as JSON lines; a file with rows is continued. A fault's system and layout
without it is among the right rows of docs/others.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.other_trainers import read, run_cases
from benchmarks.other_trainers_cases import case
from benchmarks.seeded_faults import FAULTS

HEAD = """\
# Faults in other systems

Each is put into a system's own objects or functions before the first of two steps, on two or four
ranks of CPU processes, and the run is compared by [`prove`](../guides/is-my-training-right.md).
"Named" is the kind of the first fault of the verdict. The same systems and layouts without faults
are rows of [the table](../others.md). `tests/seeded_trainers.py` has more, on torch's engines.
Rows are kept until their system is run again, so they are of several runs.

`python -m benchmarks.foreign_faults --page docs/records/foreign-faults.md` writes this page.

"""


def asked(only: str = "") -> list[dict[str, Any]]:
    """Return the cases of the worker, one for each fault."""
    return [
        {**case(f.system, f.family, f.layout, f.microbatches, f.ranks), "seeded": name}
        for name, f in FAULTS.items()
        if only in f.system
    ]


def named(row: dict[str, Any]) -> str:
    """Return the kind of the first fault that a row names, or why there is none."""
    if "crashed" in row:
        return f"raises: {row['crashed'].splitlines()[0][:80]}"
    verdict = row["verdict"]
    if verdict["refused"]:
        return f"refused: {verdict['refused'][:80]}"
    return verdict["faults"][0]["kind"] if verdict["faults"] else "nothing"


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page of all faults that have a row."""
    known = [row for row in rows if row.get("seeded") in FAULTS]
    right = sum(named(row) == FAULTS[row["seeded"]].kind for row in known)
    lines = [
        f"{right} of {len(known)} are named with their kind; "
        f"{sum(named(row) == 'nothing' for row in known)} pass.\n",
        "| system | model | layout | fault | kind | named |",
        "|---|---|---|---|---|---|",
    ]
    for row in known:
        layout = ", ".join(f"{key}={value}" for key, value in row["layout"].items())
        cells = (
            *(row["system"], row["family"], layout, row["seeded"].split(": ")[-1]),
            *(FAULTS[row["seeded"]].kind, named(row)),
        )
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """Run the faults that are asked for, print the count, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("build/foreign-faults.jsonl"))
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = {row["seeded"] for row in read(args.out)}
    left = [one for one in asked(args.only) if one["seeded"] not in done]
    for system, ranks in dict.fromkeys((one["system"], one["ranks"]) for one in left):
        run_cases(
            [x for x in left if (x["system"], x["ranks"]) == (system, ranks)], ranks, args.out
        )
    text = page(read(args.out))
    print(text.removeprefix(HEAD))
    if args.page is not None:
        args.page.write_text(text)


if __name__ == "__main__":
    main()
