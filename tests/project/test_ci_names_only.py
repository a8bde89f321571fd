"""The check that a change is one of local names alone."""

import pytest
from ci.names_only import names_changed

BEFORE = '''
def total(rows, scale=1):
    """Sum."""
    found = 0
    for one in rows:
        found += one.size * scale
    return f"{found}"
'''


def test_local_names_docstrings_and_comments_may_change():
    after = BEFORE.replace("found", "bytes_kept").replace("one", "row").replace("Sum.", "Add up.")
    assert names_changed(BEFORE, after + "# a comment\n") == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("one.size", "one.length"),
        ("found += one", "found -= one"),
        ("{found}", "{scale}"),  # another variable
        ("for one in rows:", "for found in rows:"),  # two variables become one
        ("scale=1", "scale=2"),
        ("def total", "def sum_of"),
        ('f"{found}"', 'f"{found} bytes"'),
    ],
)
def test_anything_else_is_told(old, new):
    assert names_changed(BEFORE, BEFORE.replace(old, new)) != []


def test_names_that_trade_places_are_told():
    before = "def f(a, b):\n    return a - b\n"
    assert names_changed(before, "def f(b, a):\n    return b - a\n") == []
    assert names_changed(before, "def f(a, b):\n    return b - a\n") != []


def test_a_keyword_of_a_call_is_told_with_its_line():
    (line,) = names_changed("def f():\n    g(a=1)\n", "def f():\n    g(b=1)\n")
    assert line == "f, line 2: keyword a -> b"


def test_variables_of_comprehensions_and_lambdas_are_their_own():
    before = (
        "def f(a, b):\n    return [one for one in a], [one for one in b], lambda one: one + a\n"
    )
    after = "def f(a, b):\n    return [x for x in a], [y for y in b], lambda z: z + a\n"
    assert names_changed(before, after) == []
    assert names_changed(before, after.replace("z + a", "z + b")) != []


def test_a_variable_of_a_comprehension_hides_no_other():
    before = "def f(a, b):\n    return [one + b for one in a]\n"
    assert names_changed(before, "def f(a, b):\n    return [b + b for b in a]\n") != []
    assert names_changed(before, "def f(a, x):\n    return [x + x for x in a]\n") != []
