"""The table of fault cases: what it takes from a report, and what it does to a page."""

import datetime
import json

from benchmarks.fault_cases import BEGIN, CASES, END, main, put, read, rows, section, shown

FOLDER = "/tmp/pytest-of-someone/pytest-7/test_killed_0"


def outcome(code, message, seconds, again=None):
    told = {"code": code, "message": message, "seconds": seconds, "again_s": again}
    return json.dumps(told).replace('"', "&quot;")


def report(path, *tests):
    """Write a JUnit report of tests: cases, name, outcomes, and what else is in its element."""
    cases = "".join(
        f'<testcase classname="tests.test_x" name="{name}"><properties>'
        f'<property name="cases" value="{numbers}"/>'
        + "".join(f'<property name="outcome" value="{one}"/>' for one in outcomes)
        + f"</properties>{more}</testcase>"
        for numbers, name, outcomes, more in tests
    )
    other = '<testcase classname="tests.test_x" name="test_other"/>'
    path.write_text(f"<testsuites><testsuite>{cases}{other}</testsuite></testsuites>")
    return path


def test_variants_of_a_test_are_one_row_of_each_of_its_cases(tmp_path):
    found = report(
        tmp_path / "r.xml",
        ("1 25", "test_killed[data]", [outcome(0, f"{FOLDER}/runs | SIGKILL", 9.0, 4.0)], ""),
        ("1 25", "test_killed[save]", [outcome(0, "the same", 5.0, 3.0)], ""),
        ("20", "test_lock", [outcome(2, "in use", 0.01), outcome(None, "taken", 0.2)], ""),
    )
    table = rows(read(found))
    assert [(row["case"], row["test"], row["count"]) for row in table] == [
        (1, "test_killed", 2),
        (20, "test_lock", 2),
        (25, "test_killed", 2),
    ]
    assert table[0]["variants"] == ["data", "save"]
    text = section(table, datetime.date(2026, 1, 2))
    assert text.startswith("2026-01-02, Python ")
    assert (
        "| 1 | killed | 2 | 0 | .../runs \\| SIGKILL | 7.0 (5.0 to 9.0) | 3.5 (3.0 to 4.0) |"
        in (text)
    )
    assert "| 20 | lock | 2 | 2, goes on | in use | 0.1 (<0.1 to 0.2) |  |" in text


def test_a_long_message_is_cut():
    assert shown("a  b\nc") == "a b c"
    assert len(shown("word " * 100)) <= 150
    assert shown("word " * 100).endswith("...")


def test_what_is_missing_or_failed_is_said(tmp_path, capsys):
    every = [(str(n), f"test_{n}", [outcome(0, "", 1.0)], "") for n in CASES]
    assert main([str(report(tmp_path / "all.xml", *every))]) == 0
    assert main([str(report(tmp_path / "less.xml", *every[1:]))]) == 1
    assert "no outcome of cases [1]" in capsys.readouterr().err
    every[3] = (*every[3][:3], "<failure/>")
    assert main([str(report(tmp_path / "bad.xml", *every))]) == 1
    shown_at_all = capsys.readouterr()
    assert "failed: ['test_4']" in shown_at_all.err
    assert "| 4 | 4 (failure) |" in shown_at_all.out


def test_only_what_is_between_the_marks_is_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put(page, "new\n")
    put(page, "newer\n")
    assert page.read_text() == f"before\n{BEGIN}\nnewer\n{END}\nafter\n"
