"""A run that is asked to stop, that finds its folder taken, or whose supervisor is gone.

The numbers are those of docs/records/fault-cases.md.
"""

import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faulty import (
    RUN,
    end_supervisor,
    events_of,
    last_files,
    listening_addresses,
    send,
    start_train,
    wait_for,
    wait_for_phase,
    wait_for_steps,
    wait_until_gone,
)
from meshwright.checkpoint.weights import load_model
from meshwright.errors import ConfigError
from meshwright.runtime.checks.start import Resume
from meshwright.runtime.session import train
from meshwright.runtime.supervise.lock import RunLock
from runs import clean_environ, rank_pids

LONG = ["train.steps=100000", "layout.dp_replicate=2"]

# --- SIGTERM (case 6) ------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.case(6)
def test_sigterm_saves_and_exits_with_4(corpus, tmp_path, outcome):
    process = start_train(corpus, tmp_path, *LONG)
    folder = tmp_path / "runs" / "run"
    wait_for_steps(folder, process)
    assert stop(process, folder, outcome).startswith("stopped on request after")
    assert load_model(folder) is not None


def stop(process, folder, outcome):
    """Send SIGTERM and look at what is left; returns how the run says that it has ended."""
    out, seconds = send(process, signal.SIGTERM)
    assert process.returncode == 4, out
    assert rank_pids(folder) == []
    (said,) = [line for line in out.splitlines() if line.startswith("stopped on request")]
    outcome.add(process.returncode, said, seconds)
    return said


def assert_saved_where_it_stopped(folder):
    last = events_of(folder)[-1]
    assert (last["event"], last["stopped"]) == ("end", True)
    last_files(folder, last["step"])


@pytest.mark.faults
@pytest.mark.case(6)
@pytest.mark.parametrize(
    ("phase", "step", "overrides"),
    [
        ("update", 2, []),
        ("eval", 1, ["train.eval_every=1"]),
        ("save", 1, ["checkpoint.every=1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sigterm_saves_the_same_step_on_all_ranks(
    corpus, tmp_path, phase, step, overrides, outcome
):
    """The fault sleeps in the phase, so that the signal comes in it."""
    process = start_train(corpus, tmp_path, *LONG, *overrides, FAULT=f"1:{phase}:{step}:sleep=3")
    folder = tmp_path / "runs" / "run"
    wait_for_phase(folder, process, phase)
    stop(process, folder, outcome)
    assert_saved_where_it_stopped(folder)


NOTHING_DONE = "stopped on request before the first step was done: there is nothing to save"


@pytest.mark.faults
@pytest.mark.case(6)
@pytest.mark.parametrize(
    ("phase", "step"), [("start", 0), ("load", 0), ("data", 1), ("forward", 1), ("reduce", 1)]
)
def test_sigterm_before_a_step_is_done_ends_at_once(corpus, tmp_path, phase, step, outcome):
    process = start_train(corpus, tmp_path, *LONG, FAULT=f"1:{phase}:{step}:sleep=60")
    folder = tmp_path / "runs" / "run"
    wait_for_phase(folder, process, phase)
    started = time.monotonic()
    assert stop(process, folder, outcome) == NOTHING_DONE
    assert time.monotonic() - started < 50


@pytest.mark.faults
@pytest.mark.case(6)
@pytest.mark.timeout(400)
def test_sigterm_while_a_rank_compiles(corpus, tmp_path, outcome):
    """The signal comes while the compiler of C++ runs for one of them."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    process = start_train(corpus, tmp_path, *LONG, "train.compile=true", **cache)
    folder = tmp_path / "runs" / "run"

    def compiles():
        return any("cc1plus" in name for pid in rank_pids(folder) for name in descendants(pid))

    wait_for(compiles, "the compiler", process, timeout_s=200)
    assert stop(process, folder, outcome) == NOTHING_DONE


def descendants(pid):
    """Return the program names of the processes that a process has started, and those have."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in tasks.read_text().split():
                found += [Path(f"/proc/{child}/comm").read_text().strip(), *descendants(child)]
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.faults
@pytest.mark.case(6)
def test_sigterm_while_the_ranks_start_ends_them(corpus, tmp_path, outcome):
    process = start_train(corpus, tmp_path, *LONG)
    folder = tmp_path / "runs" / "run"
    wait_for(lambda: len(rank_pids(folder)) == 2, "two ranks", process)
    assert stop(process, folder, outcome) == NOTHING_DONE


# --- two runs in one folder (case 20) --------------------------------------------------------


@pytest.mark.case(20)
def test_a_folder_in_use_is_refused_with_who_uses_it(go, config, outcome):
    folder, _, _ = go(None, "train.steps=2")
    again = config(*RUN, "train.steps=4")
    with RunLock(folder / "lock"), outcome.refused(ConfigError) as caught:
        train(again, clean_environ(), io.StringIO(), resume=Resume(folder))
    text = str(caught.value)
    assert text.startswith(
        f"run folder {folder} is in use by process {os.getpid()} on {socket.gethostname()} since "
    )
    assert train(again, clean_environ(), io.StringIO(), resume=Resume(folder)).exit_code == 0
    assert (folder / "lock").read_text() == ""


@pytest.mark.case(20)
def test_a_lock_of_a_dead_process_is_taken_over_once_its_ranks_are_gone(tmp_path, outcome):
    path = tmp_path / "lock"
    code = (
        "import os, subprocess, sys\n"
        "from meshwright.runtime.supervise.lock import RunLock\nfrom pathlib import Path\n"
        f"lock = RunLock(Path({str(path)!r})).__enter__()\n"
        "child = subprocess.Popen(['sleep', '60'], pass_fds=[lock.descriptor],"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\nos._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    child = int(done.stdout)
    with outcome.refused(ConfigError, "is in use by a rank that process"), RunLock(path):
        pass
    os.kill(child, signal.SIGKILL)
    started = time.monotonic()

    def taken():
        try:
            with RunLock(path) as lock:
                return lock.left_by
        except ConfigError:
            return None

    assert wait_for(taken, "the lock", timeout_s=10.0)["pid"] != os.getpid()
    outcome.add(None, "the lock of a dead process is taken over", time.monotonic() - started)


# --- who listens, and who is left (case 24) --------------------------------------------------


@pytest.mark.faults
@pytest.mark.case(24)
def test_ranks_end_with_a_killed_supervisor_and_listen_on_loopback_only(corpus, tmp_path, outcome):
    process = start_train(corpus, tmp_path, *LONG)
    folder = tmp_path / "runs" / "run"
    wait_for_steps(folder, process)
    pids = rank_pids(folder)
    assert len(pids) == 2
    found = listening_addresses(pids)
    assert found == {"127.0.0.1"}
    end_supervisor(process)
    seconds = wait_until_gone(folder)
    outcome.add(-signal.SIGKILL, f"the ranks listened on {', '.join(found)} only", seconds)


@pytest.mark.case(24)
@pytest.mark.faults
def test_restarted_ranks_listen_on_loopback_only_and_on_the_same_port(corpus, tmp_path, outcome):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start_train(corpus, tmp_path, *LONG, f"cluster.port={port}", "checkpoint.every=1")
    folder = tmp_path / "runs" / "run"
    wait_for_steps(folder, process)
    pids = rank_pids(folder)
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()
    events = folder / "events.jsonl"
    # Anew or from a step: the kill may have come before the first was saved.
    wait_for(lambda: events.read_text().count('"event": "start"') == 2, "the restart", process)
    seconds = time.monotonic() - killed
    again = rank_pids(folder)
    assert len(again) == 2
    assert not set(again) & set(pids)
    found = listening_addresses(again)
    assert found == {"127.0.0.1"}
    outcome.add(None, f"the new ranks listen on {', '.join(found)} only", seconds)
    end_supervisor(process)
    wait_until_gone(folder)
