"""How many tests, layouts or mutants a part passed, from what it leaves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

# The closing lines of `meshwright prove`, `make mutants` and `ci.processors`: passed, of so many.
CLOSING = re.compile(
    r"^(\d+) of (\d+) (?:layouts passed|mutants were caught|tests passed)", re.MULTILINE
)


class Counts(NamedTuple):
    """Checks that passed, failed and were skipped."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0


def count(code: int, junit: Path, said: str) -> Counts:
    """Return a part's counts: its report's, else its closing lines', else itself as one check.

    A part that ended badly has at least one that failed.
    """
    found = _of_report(junit) or _of_lines(said) or Counts(passed=int(code == 0))
    return found._replace(failed=max(found.failed, int(code != 0)))


def _of_report(junit: Path) -> Counts | None:
    try:
        suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):  # it was killed before, or while, it wrote it
        return None
    total, failed, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    return Counts(total - failed - errors - skipped, failed + errors, skipped)


def _of_lines(said: str) -> Counts | None:
    found = [(int(passed), int(total)) for passed, total in CLOSING.findall(said)]
    if not found:
        return None
    passed, total = map(sum, zip(*found, strict=True))
    return Counts(passed, total - passed)
