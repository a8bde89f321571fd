"""Tests that fail now and then: one failure of many runs is a failure, beside busy processes."""

import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from ci import flakes
from ci.counts import CLOSING

ROOT = Path(__file__).parents[2]
SOME = """
from pathlib import Path

def test_good(): pass

def test_third_time():
    file = Path({counter!r})
    turns = int(file.read_text()) + 1 if file.exists() else 1
    file.write_text(str(turns))
    assert turns != 3

def test_other(): pass
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "project" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(SOME.format(counter=str(tmp_path / "counter")))
    monkeypatch.setattr(flakes, "ROOT", folder.parent)
    monkeypatch.setattr(flakes, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(flakes, "BUSY", 0)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return folder


@pytest.mark.slow  # pytest and its workers start four times
def test_a_test_that_fails_once_is_found(project, capfd):
    assert flakes.main(["--seed", "1", "--times", "3", "--draw", "3"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert "failed: tests/test_some.py::test_third_time" in lines
    assert lines[-1] == "2 of 3 tests passed 3 times"
    assert CLOSING.findall(lines[-1]) == [("2", "3")]


def test_without_time_fewer_are_run_and_counted(project, monkeypatch, capfd):
    monkeypatch.setattr(flakes, "BATCH", 2)
    monkeypatch.setattr(flakes, "run", lambda ids, name: set())
    monkeypatch.setattr(flakes, "collected", lambda words: ["test_a", "test_b", "test_c"])
    assert flakes.main(["--seed", "1", "--draw", "3", "--minutes", "0"]) == 0
    said = capfd.readouterr().out.splitlines()[-1]
    assert said == "2 of 2 tests passed 5 times; 1 were drawn that no time was left for"


REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one[x.y]"><failure message="no"/></testcase>
<testcase classname="tests.test_a" name="test_two"/>
<testcase classname="tests.test_b" name="test_three"><error message="no"/></testcase>
<testcase classname="tests.test_b" name="test_four"><skipped/></testcase>
</testsuite></testsuites>"""


def test_failures_are_read_from_the_report(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    found = flakes.failures(tmp_path / "report.xml")
    assert found == {"tests/test_a.py::test_one[x.y]", "tests/test_b.py::test_three"}


def test_draws_are_their_seeds():
    ids = [f"tests/test_{n}.py::test" for n in range(1000)]
    first = flakes.drawn(ids, 200, 4)
    assert flakes.drawn(ids[::-1], 200, 4) == first != flakes.drawn(ids, 200, 5)
    assert len(set(first)) == 200
    assert sorted(flakes.drawn(ids[:3], 200, 4)) == ids[:3]


def test_busy_processes_end_with_the_work():
    with flakes.busy_processes(2):
        pass
    with pytest.raises(ZeroDivisionError), flakes.busy_processes(1):
        raise ZeroDivisionError


def test_it_uses_this_python():
    assert flakes.PYTEST[0] == sys.executable


FAILING = """
import torch
from hypothesis import given, strategies as st

def test_drawn():
    assert torch.rand(()).item() < 0, "drew %s" % torch.initial_seed()

@given(st.integers())
def test_example(n):
    assert n < 1000
"""


def test_a_failing_test_shows_its_seed_and_command(tmp_path, forks):
    """With the fixtures and hooks of this project's conftest; nothing is run a second time."""
    folder = tmp_path / "tests"
    shutil.copytree(ROOT / "tests", folder, ignore=lambda _, names: leave_tests_out(names))
    (folder / "test_failing.py").write_text(FAILING)
    words = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=3", "--hypothesis-profile=drawn"]
    with forks.all_python():
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, "tests/test_failing.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    said = done.stdout
    seed = zlib.crc32(b"tests/test_failing.py::test_drawn")
    assert f"drew {seed}" in said
    assert f"seed of random, numpy and torch: {seed}" in said
    command = "pytest tests/test_failing.py::test_drawn -m ''"
    assert f"{command} --hypothesis-profile drawn --hypothesis-seed 3" in said
    assert "n=1000," in said
    assert "@reproduce_failure(" in said
    assert said.splitlines()[-1].startswith("2 failed")
    assert "rerun" not in said


def leave_tests_out(names):
    return [one for one in names if one.startswith(("test_", "__pycache__"))]


def test_no_plugin_runs_failed_tests_again(pytestconfig):
    manager = pytestconfig.pluginmanager
    assert not {"rerunfailures", "flaky", "retry"} & {
        name for name, _ in manager.list_name_plugin()
    }
