"""The fault cases as a table: what each test of one saw, from the report of a run of them.

    python -m pytest -m case --junitxml cases.xml
    python -m benchmarks.fault_cases cases.xml --page docs/records/fault-cases.md

A test of a case carries its numbers, and records an outcome for each fault that it makes: exit
code, message, seconds from the fault to the end of the run or to the refusal. Tests that differ
in a parameter are one row, with the median and the worst of their times. With `--page`, the table
replaces the one on that page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

CASES: Final = range(1, 53)
BEGIN: Final = "<!-- measured: begin -->"
END: Final = "<!-- measured: end -->"
WIDTH: Final = 150


class Test(NamedTuple):
    """A test of some cases: its file and name, its parameters, and the outcomes it recorded."""

    cases: tuple[int, ...]
    file: str
    name: str
    variant: str
    result: str
    outcomes: tuple[dict[str, Any], ...]


def read(report: Path) -> list[Test]:
    """Return the tests of fault cases in a JUnit report of pytest."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        told = [(p.get("name"), p.get("value", "")) for p in case.iter("property")]
        numbers = next((value for name, value in told if name == "cases"), "")
        if not numbers:
            continue
        name, _, variant = case.get("name", "").partition("[")
        result = next((k for k in ("failure", "error", "skipped") if case.find(k) is not None), "")
        found.append(
            Test(
                tuple(map(int, numbers.split())),
                case.get("classname", "").split(".")[-1],
                name,
                variant.removesuffix("]"),
                result,
                tuple(json.loads(value) for name, value in told if name == "outcome"),
            )
        )
    return found


def rows(tests: Iterable[Test]) -> list[dict[str, Any]]:
    """Return a row for each case and test function, the variants of a test together."""
    groups: dict[tuple[int, str, str], list[Test]] = {}
    for test in tests:
        for case in test.cases:
            groups.setdefault((case, test.file, test.name), []).append(test)
    return [
        {"case": case, "file": file, "test": name, **_row(some)}
        for (case, file, name), some in sorted(groups.items())
    ]


def _row(tests: Sequence[Test]) -> dict[str, Any]:
    outcomes = [outcome for test in tests for outcome in test.outcomes]
    seconds = sorted(outcome["seconds"] for outcome in outcomes)
    again = sorted(o["again_s"] for o in outcomes if o["again_s"] is not None)
    return {
        "variants": [test.variant for test in tests if test.variant],
        "results": sorted({test.result for test in tests if test.result}),
        "count": len(outcomes),
        "codes": sorted({o["code"] for o in outcomes}, key=lambda code: (code is None, code)),
        "message": shown(outcomes[0]["message"]) if outcomes else "",
        "seconds": seconds,
        "again_s": again,
    }


def shown(message: str) -> str:
    """Return a message for a cell: one line, without this machine's folders, cut to fit."""
    text = re.sub(r"(/[\w.+@-]+)*/pytest-\d+/[\w.-]+", "...", " ".join(message.split()))
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= WIDTH else text[: WIDTH - 3].rstrip() + "..."


def _code(code: int | None) -> str:
    return "goes on" if code is None else f"{code}"


def _seconds(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = (f"{value:.1f}" if value >= 0.1 else "<0.1" for value in (values[0], values[-1]))
    if low == high:
        return low
    middle = statistics.median(values)
    return f"{middle:.1f} ({low} to {high})" if middle >= 0.1 else f"<0.1 (to {high})"


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| # | test | faults | exit code | what is said | to the end, s | at work again, s |",
        "|--:|---|--:|---|---|--:|--:|",
    ]
    for row in found:
        name = row["test"].removeprefix("test_").replace("_", " ")
        bad = f" ({', '.join(row['results'])})" if row["results"] else ""
        codes = ", ".join(map(_code, row["codes"]))
        lines.append(
            f"| {row['case']} | {name}{bad} | {row['count']} | {codes} | {row['message']} "
            f"| {_seconds(row['seconds'])} | {_seconds(row['again_s'])} |"
        )
    return "\n".join(lines)


def section(found: Sequence[dict[str, Any]], day: datetime.date) -> str:
    """Return what the page has between its marks."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    return f"{day.isoformat()}, {versions}, {machine}.\n\n{table(found)}\n"


def put(page: Path, text: str) -> None:
    """Replace what a page has between its marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path, nargs="+", help="JUnit reports of pytest")
    parser.add_argument("--page", type=Path, help="a page whose table is replaced")
    args = parser.parse_args(argv)
    found = rows(test for report in args.report for test in read(report))
    text = section(found, datetime.date.today())
    if args.page:
        put(args.page, text)
    else:
        print(text)
    missing = sorted(set(CASES) - {row["case"] for row in found if row["count"]})
    failed = [row["test"] for row in found if set(row["results"]) & {"failure", "error"}]
    if missing:
        print(f"no outcome of cases {missing}", file=sys.stderr)
    if failed:
        print(f"failed: {failed}", file=sys.stderr)
    return 1 if missing or failed else 0


if __name__ == "__main__":
    sys.exit(main())
