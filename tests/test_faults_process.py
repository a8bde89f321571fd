"""Ranks that are killed, stopped, hang or go astray: what the supervisor says and does.

The numbers are those of the project's table of faults. Every case ends within its bound, with its
own exit code and the cause named, leaves no process, and its last good step loads.
"""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.checkpoint.commit import read_manifest, step_name, verify
from meshwright.checkpoint.weights import load_model
from meshwright.errors import ConfigError, NoProgress, RankFailed
from meshwright.launch.fault import ACTIONS, Fault
from meshwright.launch.lock import RunLock
from meshwright.launch.restart import recoveries
from meshwright.launch.session import Resume, train
from runs import TINY, clean_environ, faulty_worker, rank_pids
from test_launch_faults import listening_addresses, start_train, wait_for_steps

STEPS = 6
RUN = ["layout.dp_replicate=2", f"train.steps={STEPS}", "checkpoint.every=2", "model.dropout=0.1"]
TENSOR = ["layout.tp=2", "layout.dp_replicate=1", "model.n_kv_heads=2"]
HANG = ["cluster.hang=3", "cluster.timeout=60"]


@pytest.fixture
def go(config, tmp_path):
    """Return a function that trains with a fault, and says what came of it."""

    def run(fault, *overrides, bound_s=90.0, error=None, body=None, name="run"):
        environ = clean_environ() | ({"FAULT": fault} if fault else {})
        more = {} if body is None else {"command": faulty_worker(body)}
        out, started = io.StringIO(), time.monotonic()
        asked = config(*RUN, f"log.name={name}", *overrides)
        folder = tmp_path / "runs" / name
        if error is None:
            assert train(asked, environ, out, **more).exit_code == 0, out.getvalue()
            text = out.getvalue()
        else:
            with pytest.raises(error) as caught:
                train(asked, environ, out, **more)
            text = str(caught.value)
        assert time.monotonic() - started < bound_s
        assert rank_pids(folder) == []
        events = folder / "events.jsonl"
        told = [json.loads(line) for line in events.read_text().splitlines()]
        return folder, text, told

    return run


@pytest.fixture
def whole(go):
    """Return the hashes of the last step's files of a run that nothing disturbs."""

    def run(*overrides):
        folder, _, _ = go(None, *overrides, name="whole")
        return last_files(folder)

    return run


def last_files(folder, step=STEPS):
    path = folder / "checkpoints" / step_name(step)
    verify(path)
    assert load_model(path) is not None
    return read_manifest(path)["files"]


def of(events, kind):
    return [event for event in events if event["event"] == kind]


# --- 1, 25: a killed rank --------------------------------------------------------------------


def kill_and_compare(go, whole, fault, *overrides):
    rank, phase, step = fault.split(":")[:3]
    folder, _, events = go(fault, *overrides)
    restart = of(events, "restart")[0]
    assert re.match(
        rf"rank {rank} was killed by SIGKILL, possibly by the system for want of memory "
        rf"\(predicted \d+\.\d+ [KM]iB of tensors, measured \d+\.\d+ MiB at step "
        rf"{int(step) - 1}\), in step {step}, {phase}",
        restart["cause"],
    ), restart["cause"]
    assert restart["attempt"] == 1
    assert 0 < restart["detect_s"] < 2
    starts = of(events, "start")
    assert [start["from_step"] for start in starts] == [0, restart["from_step"]]
    assert restart["from_step"] + restart["lost_steps"] >= int(step) - 1
    cost = next(recoveries(events))
    assert cost.detect_s == restart["detect_s"]
    assert 0 < cost.restart_s < 60
    assert cost.seconds >= cost.detect_s + cost.restart_s
    assert last_files(folder) == whole(*overrides)
    return restart


def test_a_killed_rank_is_named_and_the_run_goes_on_bit_for_bit(go, whole):
    restart = kill_and_compare(go, whole, "1:forward:4:kill")
    assert (restart["from_step"], restart["lost_steps"]) == (2, 1)


@pytest.mark.faults
@pytest.mark.parametrize("phase", ["data", "backward", "reduce", "update"])
def test_a_rank_killed_in_any_phase(go, whole, phase):
    kill_and_compare(go, whole, f"0:{phase}:4:kill", *TENSOR)


@pytest.mark.faults
@pytest.mark.parametrize("phase", ["start", "load"])
def test_a_rank_killed_before_the_first_step(go, whole, phase):
    folder, _, events = go(f"1:{phase}:0:kill")
    restart = of(events, "restart")[0]
    assert "rank 1 was killed by SIGKILL" in restart["cause"]
    assert (restart["from_step"], restart["lost_steps"]) == (0, 0)
    assert last_files(folder) == whole()


@pytest.mark.faults
def test_a_rank_killed_in_a_save(go, whole):
    folder, _, events = go("1:save:4:kill")
    assert of(events, "restart")[0]["from_step"] in (2, 4)  # the other one may have committed
    assert last_files(folder) == whole()


# --- 5: again and again ----------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_twenty_restarts_of_twenty(go, whole):
    """Each attempt saves one step, and is killed in the next."""
    steps = ["train.steps=21", "checkpoint.every=1"]
    folder, _, events = go("1:forward:*:kill:always", *steps, bound_s=500, body=EVERY_OTHER)
    assert [event["attempt"] for event in of(events, "restart")] == list(range(1, 21))
    assert last_files(folder, 21) == last_files(go(None, *steps, name="whole")[0], 21)


# Acts from the second step of an attempt on, so that each attempt commits one.
EVERY_OTHER = """
import meshwright.launch.inject as inject
act = inject.Injector.__call__
seen = set()
def later(self, phase, step):
    if phase == "forward":
        seen.add(step)
        if len(seen) < 2:
            return
    act(self, phase, step)
inject.Injector.__call__ = later
"""


@pytest.mark.faults
def test_no_progress_ends_the_run(go):
    limits = ["checkpoint.restarts=2", "checkpoint.every=3"]
    folder, text, events = go("0:update:5:raise=no luck:always", *limits, error=NoProgress)
    assert text.startswith(
        "no progress beyond step 3 though the ranks were started again 2 times "
        "(checkpoint.restarts = 2). The last failure: rank 0 raised RuntimeError: no luck\n"
    )
    assert NoProgress.exit_code == 5
    # The first failure came after a new step, so it does not count.
    assert [event["from_step"] for event in of(events, "restart")] == [3, 3]
    last_files(folder, 3)


@pytest.mark.faults
def test_without_checkpoints_later_steps_are_progress(go):
    limits = ["checkpoint.restarts=1", "checkpoint.every=0"]
    _, text, events = go("0:update:4:raise:always", *limits, error=NoProgress)
    assert "no progress beyond step 3 though the ranks were started again once" in text
    assert len(of(events, "restart")) == 1


def test_what_another_attempt_cannot_help_is_not_tried(go):
    body = (
        "import meshwright.launch.worker as worker\n"
        "from meshwright.errors import DataError\n"
        "def refuse(*a, **k):\n    raise DataError('the data is gone')\n"
        "worker.open_data = refuse"
    )
    folder, text, _ = go(None, error=RankFailed, body=body)
    assert "the data is gone" in text
    assert '"restart"' not in (folder / "events.jsonl").read_text()


# --- 6: SIGTERM ------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize(
    ("phase", "overrides"),
    [
        ("start", []),
        ("load", []),
        ("forward", ["train.compile=true"]),
        ("update", []),
        ("eval", ["train.eval_every=1"]),
        ("save", ["checkpoint.every=1"]),
    ],
)
def test_sigterm_saves_the_same_step_on_all_ranks(corpus, tmp_path, phase, overrides):
    """The fault sleeps in the phase, so that the signal comes in it."""
    step = {"start": 0, "load": 0}.get(phase, 1)
    os.environ["FAULT"] = f"1:{phase}:{step}:sleep=3"
    try:
        process = start_train(
            corpus, tmp_path, "train.steps=100000", "layout.dp_replicate=2", *overrides
        )
    finally:
        del os.environ["FAULT"]
    folder = tmp_path / "runs" / "run"
    wait_for_phase(folder, process, phase)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert time.monotonic() - started < 60
    assert process.returncode == 4, out
    assert rank_pids(folder) == []
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    last = events[-1]
    assert (last["event"], last["stopped"]) == ("end", True)
    last_files(folder, last["step"])


def wait_for_phase(folder, process, phase):
    from meshwright.execute.ledger_file import read_ledger

    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        reading = read_ledger(folder / "logs" / "rank-1.ledger")
        if reading is not None and reading.phase == phase:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    raise AssertionError(f"rank 1 never came to {phase}")


@pytest.mark.faults
def test_sigterm_while_the_ranks_start_ends_them(corpus, tmp_path):
    process = start_train(corpus, tmp_path, "train.steps=100000", "layout.dp_replicate=2")
    folder = tmp_path / "runs" / "run"
    deadline = time.monotonic() + 60
    while len(rank_pids(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 4, out
    assert rank_pids(folder) == []


# --- 12: a slow rank -------------------------------------------------------------------------


@pytest.mark.faults
def test_a_slow_rank_is_named(go):
    _, text, events = go("1:forward:*:sleep=0.3", "train.steps=24")
    slow = of(events, "slow_rank")
    assert slow
    assert {event["rank"] for event in slow} == {1}
    assert slow[0]["others_wait"] > 0.5 > 2 * slow[0]["waits"]
    assert "rank 1 is slow: from step" in text


# --- 13, 14, 15: hanging ---------------------------------------------------------------------


@pytest.mark.faults
def test_a_stopped_rank_is_named_with_what_the_others_wait_in(go, whole):
    pipeline = ["layout.pp=2", "layout.dp_replicate=1", "layout.microbatch=1"]
    folder, _, events = go("1:forward:5:stop", *HANG, *pipeline)
    cause = of(events, "restart")[0]["cause"]
    assert "rank 1 is stopped (SIGSTOP) in step 5, forward of microbatch 0 on stage 1" in cause
    assert "rank 0 waits in recv #" in cause
    assert "of pp from rank 1 (" in cause
    assert "which rank 1 has not begun" in cause
    assert 3 <= of(events, "restart")[0]["detect_s"] < 5
    assert last_files(folder) == whole(*pipeline)


@pytest.mark.faults
def test_a_held_gil_does_not_stop_the_watchdog(go, whole):
    folder, _, events = go("0:backward:4:hang_gil", *HANG)
    cause = of(events, "restart")[0]["cause"]
    assert "rank 0 is silent for 3." in cause
    assert "in step 4, backward of microbatch 0 on stage 0 (sleeping)" in cause
    assert "rank 1 waits in all_reduce #" in cause
    # The stacks are in the logs, of threads that could print them.
    assert "replicas.py" in (folder / "logs" / "rank-1.log").read_text()
    assert last_files(folder) == whole()


@pytest.mark.faults
def test_a_segfault_is_named_and_its_stack_kept(go, whole):
    folder, _, events = go("1:update:4:segfault")
    assert of(events, "restart")[0]["cause"] == "rank 1 was killed by SIGSEGV, in step 4, update"
    log = (folder / "logs" / "rank-1.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert "update.py" in log
    assert last_files(folder) == whole()


SKIP = """
from meshwright.execute.parallel import Parallel
real, calls = Parallel.count_targets, []
def count(self, batch):
    calls.append(1)
    if rank == 1 and len(calls) == 3:
        return (batch.targets >= 0).sum() * 2
    return real(self, batch)
Parallel.count_targets = count
"""
OTHER = """
import torch
import torch.distributed as dist
from meshwright.execute.parallel import Parallel
real, calls = Parallel.count_targets, []
def count(self, batch):
    calls.append(1)
    if rank == 1 and len(calls) == 3:
        found = [torch.zeros(7) for _ in range(2)]
        dist.all_gather(found, torch.zeros(7), group=self.groups.data.group)
    return real(self, batch)
Parallel.count_targets = count
"""


@pytest.mark.faults
def test_a_skipped_collective_is_named_on_both_ranks(go):
    limits = ["checkpoint.restarts=0", "layout.dp_shard=2", "layout.zero=3"]
    limits += ["layout.dp_replicate=1", *HANG]
    _, text, _ = go(None, *limits, error=RankFailed, body=SKIP)
    assert "rank 0 waits in all_reduce #3 of data (8 bytes), which rank 1 has not begun" in text
    assert "rank 1 waits in all_gather #" in text
    assert "of shard (" in text


@pytest.mark.faults
def test_a_mismatched_collective_is_named_on_both_ranks(go):
    limits = ["checkpoint.restarts=0", *HANG]
    _, text, _ = go(None, *limits, error=RankFailed, body=OTHER)
    assert (
        "ranks disagree: rank 0 is in all_reduce #3 of data (8 bytes) in step 3, data, "
        "but rank 1 is in all_gather #3 of data (56 bytes) in step 3, data"
    ) in text


@pytest.mark.faults
def test_a_time_out_names_the_rank_that_was_waited_for(go):
    limits = ["cluster.timeout=4", "cluster.hang=0", "checkpoint.restarts=0"]
    _, text, events = go("1:forward:4:stop", *limits, error=RankFailed)
    assert text.startswith("rank 0 raised RuntimeError: ")
    assert "Timed out waiting 4000ms" in text
    assert "rank 1 is stopped (SIGSTOP) in step 4, forward of microbatch 0 on stage 0" in text
    assert "rank 1 is stopped" in of(events, "failed")[0]["cause"]


# --- 20: two runs in one folder --------------------------------------------------------------


def test_a_folder_in_use_is_refused_with_who_uses_it(go, config, tmp_path):
    folder, _, _ = go(None, "train.steps=2")
    again = config(*RUN, "train.steps=4")
    with RunLock(folder / "lock"), pytest.raises(ConfigError) as caught:
        train(again, clean_environ(), io.StringIO(), resume=Resume(folder))
    text = str(caught.value)
    assert text.startswith(
        f"run folder {folder} is in use by process {os.getpid()} on {socket.gethostname()} since "
    )
    assert train(again, clean_environ(), io.StringIO(), resume=Resume(folder)).exit_code == 0
    assert (folder / "lock").read_text() == ""


def test_a_lock_of_a_dead_process_is_taken_over_once_its_ranks_are_gone(tmp_path):
    path = tmp_path / "lock"
    code = (
        "import os, subprocess, sys\n"
        "from meshwright.launch.lock import RunLock\nfrom pathlib import Path\n"
        f"lock = RunLock(Path({str(path)!r})).__enter__()\n"
        "child = subprocess.Popen(['sleep', '60'], pass_fds=[lock.descriptor],"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\nos._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    child = int(done.stdout)
    with pytest.raises(ConfigError, match="is in use by a rank that process"), RunLock(path):
        pass
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with RunLock(path) as lock:
                assert lock.left_by["pid"] != os.getpid()
                return
        except ConfigError:
            time.sleep(0.02)
    raise AssertionError("the lock stayed")


# --- 24: what a restart listens on -----------------------------------------------------------


def test_restarted_ranks_listen_on_loopback_only_and_on_the_same_port(corpus, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start_train(
        corpus,
        tmp_path,
        *("train.steps=100000", "layout.dp_replicate=2", f"cluster.port={port}"),
        "checkpoint.every=1",
    )
    folder = tmp_path / "runs" / "run"
    wait_for_steps(folder, process)
    pids = rank_pids(folder)
    os.kill(pids[1], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while '"event": "resume"' not in (folder / "events.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = rank_pids(folder)
    assert len(again) == 2
    assert not set(again) & set(pids)
    assert listening_addresses(again) == {"127.0.0.1"}
    process.kill()  # the system ends the ranks then
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while rank_pids(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert rank_pids(folder) == []


@pytest.mark.faults
def test_a_rank_that_holds_the_gil_does_not_outlive_its_supervisor(corpus, tmp_path):
    os.environ["FAULT"] = "1:update:2:hang_gil"
    try:
        process = start_train(corpus, tmp_path, "train.steps=100000", "layout.dp_replicate=2")
    finally:
        del os.environ["FAULT"]
    folder = tmp_path / "runs" / "run"
    wait_for_phase(folder, process, "update")
    wait_for_steps(folder, process)
    time.sleep(1)
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while rank_pids(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert rank_pids(folder) == []


# --- 26: a clock that is wrong ---------------------------------------------------------------

SKEW = """
if rank == 0:
    real = time.time
    time.time = lambda: real() - 86400.0
"""


@pytest.mark.faults
def test_a_wrong_clock_on_one_rank_changes_nothing(go, whole):
    folder, _, events = go("1:forward:4:kill", body=SKEW)
    starts = of(events, "start")
    assert starts[0]["time"] < time.time() - 80000
    steps = of(events, "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 3, 4, 5, 6]
    assert all(event["step_time_s"] > 0 for event in steps)
    assert 0 < of(events, "restart")[0]["detect_s"] < 2
    assert last_files(folder) == whole()


# --- torchrun --------------------------------------------------------------------------------


@pytest.mark.faults
def test_torchrun_restarts_go_on_with_the_run(corpus, tmp_path, whole):
    words = [*TINY, *RUN, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += [f"log.dir={tmp_path / 'runs'}"]  # no name: the attempts find their run
    at = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *at, "-m", "meshwright", "train", *words],
        capture_output=True,
        text=True,
        env={**clean_environ(), "OMP_NUM_THREADS": "1", "FAULT": "1:backward:4:kill"},
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folders = [path for path in (tmp_path / "runs").iterdir() if path.name.startswith("run-")]
    assert len(folders) == 1
    assert not list((tmp_path / "runs").glob(".torchrun*"))
    events = [json.loads(line) for line in (folders[0] / "events.jsonl").read_text().splitlines()]
    restart = of(events, "restart")[0]
    assert (restart["attempt"], restart["from_step"], restart["lost_steps"]) == (1, 2, 1)
    assert [event["from_step"] for event in of(events, "start")] == [0, 2]
    assert last_files(folders[0]) == whole()
    assert (Path(folders[0]) / "lock").read_text() == ""


# --- the injector itself ---------------------------------------------------------------------


def test_faults_are_parsed_strictly():
    assert Fault.parse("1:save:7:sleep=0.3") == Fault(1, "save", 7, "sleep", "0.3")
    assert Fault.parse("0:forward:*:kill:always") == Fault(0, "forward", None, "kill", always=True)
    for text, said in (
        ("1:forward:3", "FAULT is rank:phase:step:action"),
        ("x:forward:3:kill", "rank and step are numbers"),
        ("1:forwards:3:kill", "'forwards' is unknown; nearest legal: forward"),
        ("1:forward:3:killl", "'killl' is unknown; nearest legal: kill"),
    ):
        with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
            Fault.parse(text)


def test_every_action_has_a_deed():
    from meshwright.launch.inject import _DEEDS

    assert tuple(_DEEDS) == ACTIONS


@pytest.mark.faults
def test_numbers_that_are_not_finite_end_the_run_with_the_tensor_named(go):
    _, text, _ = go("1:forward:4:nan:always", error=RankFailed)
    assert "is not finite" in text
