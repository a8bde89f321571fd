"""How CI runs its parts: within limits, whatever fails, and what it counts."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ci.__main__ import chosen
from ci.counts import Counts, count
from ci.debian import Package, missing
from ci.parts import Part, of_commit
from ci.running import Budget, Result, descendants, run_all, run_part, table

ROOT = Path(__file__).parents[2]
AMPLE = Budget(1e6, 1e6)


def part(name, *command, minutes=1.0, **words):
    return Part(name, command, minutes, needs=words.pop("needs", frozenset()), **words)


def python(name, code, **words):
    return part(name, sys.executable, "-c", code, **words)


def test_all_parts_are_run_whatever_fails(tmp_path, capfd):
    parts = [
        python("bad", "print('said this'); raise SystemExit(3)"),
        part("missing", str(tmp_path / "no-such-program")),
        python("good", "pass"),
        python("child", "pass", needs=frozenset({"bad"})),
    ]
    results = run_all(parts, tmp_path, AMPLE)
    assert [one.outcome for one in results] == ["failed", "failed", "passed", "not run"]
    assert [one.is_good for one in results] == [False, False, True, False]
    assert (tmp_path / "bad.log").read_text() == "said this\n"
    assert "said this" in capfd.readouterr().out
    assert table(results).splitlines()[-1] == "1 passed, 3 failed, 0 skipped"


def test_parts_keep_compiled_modules(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (one,) = run_all(
        [python("kept", "import sys; sys.exit(sys.dont_write_bytecode)")], tmp_path, AMPLE
    )
    assert one.outcome == "passed"


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    started = tmp_path / "pid"
    code = f"""
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
inner = "import time; time.sleep(600)"
other = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
pathlib.Path({str(started)!r}).write_text(str(other.pid))
time.sleep(600)
"""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER.format(code=code, folder=str(tmp_path), limit=5)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "timed out Counts(passed=0, failed=1, skipped=0)"
    assert not Path(f"/proc/{started.read_text()}").exists()


# A runner in a process of its own: it ends all that comes from it, and the tests have pools.
DRIVER = """
import sys
from pathlib import Path
import ci.running as running
from ci.parts import Part
running.GRACE_S = 2.0
running.adopt_orphans()
part = Part("slow", (sys.executable, "-c", {code!r}), 1)
result = running.run_part(part, Path({folder!r}), {limit})
assert not running.descendants(running.os.getpid())
print(result.outcome, result.counts)
"""


def test_optional_parts_are_left_out_where_time_is_short_and_required_ones_fail(tmp_path, capfd):
    now = iter([0.0, 0.0, 60.0, 60.0, 200.0])
    parts = [
        python("first", "pass"),
        python("too long", "pass", minutes=3, is_required=False),
        python("short", "pass", minutes=1, is_required=False),
        python("late", "pass"),
    ]
    results = run_all(parts, tmp_path, Budget(soft=150, hard=200), clock=lambda: next(now))
    assert [one.outcome for one in results] == ["passed", "left out", "passed", "not run"]
    assert [one.is_good for one in results] == [True, True, True, False]
    said = capfd.readouterr().out
    assert "too long: left out: it takes 3 minutes, and 2 are left" in said
    assert "late: not run: all 3 minutes are spent" in said


def test_parts_share_what_the_others_leave(tmp_path, capfd):
    budget = Budget(soft=20 * 60, hard=1e6)
    said = "print('given', {minutes})"
    parts = [
        python("first", "pass"),
        python("one", said, between=(2, 8)),
        python("other", said, between=(2, 8)),
        python("last", "pass", minutes=3),
        python("optional", "pass", minutes=3, is_required=False),
    ]
    # Seconds since the begin at which the parts start: 17 minutes are left, then 13.
    for starts, given in (
        ((0, 0, 180, 420, 500, 500), ["7.0", "8.0"]),
        ((0, 0, 600, 840, 900, 900), ["3.5", "3.0"]),
        ((0, 0, 3000, 3060, 3100, 3100), ["2.0", "2.0"]),
    ):
        now = iter(starts)
        results = run_all(parts, tmp_path, budget, clock=lambda now=now: next(now))
        lines = capfd.readouterr().out.splitlines()
        assert [line.split()[1] for line in lines if line.startswith("given")] == given
        assert all(one.is_good for one in results)


def test_descendants_are_found_whatever_sessions_they_make():
    inner = "import subprocess,sys; subprocess.run([sys.executable,'-c','input()'])"
    outer = subprocess.Popen(
        [sys.executable, "-c", inner], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        late = time.monotonic() + 60
        while not (found := descendants(outer.pid)):
            assert time.monotonic() < late
            time.sleep(0.05)
        assert len(found) == 1
        assert outer.pid not in found
    finally:
        outer.communicate(b"\n")


REPORT = '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>'


@pytest.mark.parametrize(
    ("code", "report", "said", "expected"),
    [
        (1, REPORT, "", Counts(3, 3, 3)),
        (0, REPORT.replace('"1"', '"0"').replace('"2"', '"0"'), "", Counts(6, 0, 3)),
        (-1, "<testsuites><test", "", Counts(0, 1, 0)),
        (0, "", "39 of 40 layouts passed, 1 FAILED, in 3 s", Counts(39, 1, 0)),
        (0, "", "x\n5 of 6 mutants were caught\n", Counts(5, 1, 0)),
        (0, "", "39 of 39 tests passed 5 times; 2 were\n", Counts(39, 0, 0)),
        (2, "", "6 of 6 mutants were caught\n", Counts(6, 1, 0)),
        (0, "", "all fine", Counts(1, 0, 0)),
        (2, "", "no", Counts(0, 1, 0)),
    ],
)
def test_counts(code, report, said, expected, tmp_path):
    file = tmp_path / "report.xml"
    if report:
        file.write_text(report)
    assert count(code, file, said) == expected


def test_a_part_whose_report_has_failures_has_failed_whatever_its_status(tmp_path):
    report = tmp_path / "lax.xml"
    code = f"import pathlib; pathlib.Path({str(report)!r}).write_text({REPORT!r})"
    result = run_part(python("lax", code), tmp_path, 60)
    assert (result.outcome, result.counts) == ("failed", Counts(3, 3, 3))


def test_the_closing_line_is_one_that_is_read():
    line = table([Result(part("a"), "passed", 1.0, Counts(4, 0, 1))]).splitlines()[-1]
    assert re.fullmatch(r"\d+ passed, \d+ failed, \d+ skipped", line)


def test_unknown_parts_are_refused():
    parts = of_commit("0" * 40)
    assert [p.name for p in chosen(parts, ["lint"])] == ["lint"]
    assert [p.name for p in chosen(parts, ["lint", "types"], ["lint"])] == ["types"]
    assert len(chosen(parts, [], ["lint"])) == len(parts) - 1
    with pytest.raises(SystemExit, match="no part is called lnt; there are: setup, lint"):
        chosen(parts, ["lnt"])


def test_missing_packages_are_those_whose_command_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "here").touch(0o755)
    assert missing([Package("a", "here"), Package("b", "not-here")]) == ["b"]
