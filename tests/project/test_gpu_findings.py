"""The findings about a GPU's path: each that is mended names tests, and these are there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/records/gpu-findings.md"


def findings():
    """Yield (finding, what was done, tests) of each row of the page."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "finding":
            assert len(cells) == 3, line
            yield cells[0], cells[1], re.findall(r"`(\w+\.py)::(\w+)`", cells[2])


def functions_of(name):
    (file,) = (ROOT / "tests").glob(f"*/{name}")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_finding_that_is_mended_has_a_test_that_is_there():
    rows = list(findings())
    assert len(rows) >= 29
    for finding, done, tests in rows:
        assert tests or done.startswith("Not done"), finding
        for file, test in tests:
            assert test in functions_of(file), (file, test)
