"""The findings about a GPU's path: each that is mended names tests, and these are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/records/gpu-findings.md"


def findings():
    """Yield (finding, what was done, tests) of each row of the page."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "finding":
            assert len(cells) == 3, line
            yield cells[0], cells[1], re.findall(r"`(\w+\.py)::(\w+)`", cells[2])


def module_of(name):
    (file,) = (ROOT / "tests").glob(f"*/{name}")
    return ast.parse(file.read_text(encoding="utf-8"))


def functions_of(tree):
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def imported(tree):
    """Return the functions that a test module imports from others in `tests`, by their names."""
    functions = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            files = {*(ROOT / "tests").glob(f"{node.module}.py")}
            for file in files | {*(ROOT / "tests").glob(f"*/{node.module}.py")}:
                there = functions_of(ast.parse(file.read_text(encoding="utf-8")))
                names = {alias.name for alias in node.names}
                functions |= {name: there[name] for name in names & there.keys()}
    return functions


def problem_of(tree, name):
    """Return why a test of this name in a module cannot fail, None if it can.

    A test can fail that checks something by itself or by a helper, and is not skipped
    whatever the machine has.
    """
    functions = imported(tree) | functions_of(tree)
    if name not in functions:
        return "it is not there"
    for decorator in functions[name].decorator_list:
        text = ast.unparse(decorator)
        if re.match(r"pytest\.mark\.(skip\b|xfail)", text) or "skipif(True" in text:
            return f"it is marked: {text}"
    seen, waiting = set(), [name]
    while waiting:
        function = functions[waiting.pop()]
        seen.add(function.name)
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                if not isinstance(node.test, ast.Constant):
                    return None
            elif isinstance(node, ast.Call):
                if re.search(r"\.(raises|warns|assert_\w+)$", ast.unparse(node.func)):
                    return None
                waiting += {ast.unparse(node.func)} & functions.keys() - seen
    return "it checks nothing"


def test_each_finding_that_is_mended_has_a_test_that_can_fail():
    rows = list(findings())
    assert len(rows) >= 29
    for finding, done, tests in rows:
        assert tests or done.startswith("Not done"), finding
        for file, test in tests:
            assert problem_of(module_of(file), test) is None, (file, test)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def other():\n    assert x", "not there"),
        ("def test_a():\n    run()", "checks nothing"),
        ("def test_a():\n    assert True", "checks nothing"),
        ("@pytest.mark.skip(reason='later')\ndef test_a():\n    assert x", "is marked"),
        ("@pytest.mark.xfail\ndef test_a():\n    assert x", "is marked"),
        ("def test_a():\n    assert run() == 3", None),
        ("def check(x):\n    assert x\ndef test_a():\n    check(run())", None),
        ("def test_a():\n    with pytest.raises(ValueError):\n        run()", None),
    ],
)
def test_a_test_that_cannot_fail_is_seen(text, problem):
    seen = problem_of(ast.parse(text), "test_a")
    assert problem in seen if problem else seen is None
