"""CPU seconds of tests: those of processes that have ended count, and runs are compared by file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ci import cpu_seconds

ROOT = Path(__file__).parents[2]
BUSY = "sum(range(5_000_000)); import time; print(time.process_time())"


def test_the_seconds_of_a_child_count_once_it_has_ended():
    before_s = cpu_seconds.tree_seconds()
    # The shell has ended, too: its own child's seconds have gone through it.
    command = f'{sys.executable} -c "{BUSY}"; true'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    ticks_s = 4 * cpu_seconds.TICK_S  # each of four sums is rounded down
    assert cpu_seconds.tree_seconds() - before_s >= float(done.stdout) - ticks_s


TESTS = """
import subprocess, sys
def test_light(): pass
def test_heavy(): subprocess.run([sys.executable, "-c", "sum(range(30_000_000))"])
"""


@pytest.mark.slow  # pytest and its worker start twice
@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_tests_that_take_most_are_named_first(tmp_path, workers):
    (tmp_path / "test_some.py").write_text(TESTS)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    options = ["-p", "ci.cpu_seconds", "--cpu-seconds", "out.json", "-n", workers]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    heavy, light = found["test_some.py::test_heavy"], found["test_some.py::test_light"]
    assert heavy > light >= 0
    assert found[cpu_seconds.COLLECTION] > 0
    assert "by test:" in done.stdout


def test_two_runs_are_compared_by_file(tmp_path, monkeypatch, capsys):
    runs = {
        "first": {"tests/test_a.py::test_x[1]": 1.5, "tests/test_b.py::test_y": 4.0},
        "second": {"tests/test_a.py::test_z": 2.0},
        "after": {"tests/test_a.py::test_x[1]": 3.0, "tests/test_b.py::test_y": 0.5},
    }
    files = {name: tmp_path / f"{name}.json" for name in runs}
    for name, seconds in runs.items():
        files[name].write_text(json.dumps(seconds))
    before = ["--before", str(files["first"]), str(files["second"])]
    monkeypatch.setattr(sys, "argv", ["cpu_seconds", str(files["after"]), *before])
    cpu_seconds.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| test_b.py | 4.0 | 0.5 |",
        "| test_a.py | 3.5 | 3.0 |",
        "| all | 7.5 | 3.5 |",
    ]
