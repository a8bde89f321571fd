"""Who waits for whom, from recorders; and what `doctor` says of machines, configs and runs."""

import json
import os
import signal
import time

import pytest

from faulty import start_train, wait_for, wait_for_steps
from meshwright.cli import main
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.errors import RankFailed
from meshwright.runtime.doctor import examine_config, examine_machine
from meshwright.runtime.session import prepare_job, train
from meshwright.runtime.supervise import diagnosis
from meshwright.runtime.supervise.diagnosis import diagnose
from meshwright.runtime.supervise.explain import Witness, explain, mismatch
from meshwright.runtime.supervise.supervisor import Watchdog
from meshwright.spec.words import busy
from meshwright.training.events import JsonLines
from meshwright.training.run_folder import RunFolder
from runs import clean_environ


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def recorders(tmp_path, clock):
    """Two ranks in step 4 that have done the same three collectives."""
    (tmp_path / "logs").mkdir()
    folder = RunFolder(tmp_path)
    made = [
        FlightRecorder.open(folder.flight_recorder(rank), rank, 2, clock=clock) for rank in (0, 1)
    ]
    for recorder in made:
        for name, label in (("1", "tp"), ("2", "data")):
            recorder.group(name, (0, 1), label)
        recorder.step(4)
        for _ in range(3):
            recorder.end(recorder.begin("all_reduce", 0, 64, waits=True))
    return folder, made


def said(folder, *processes):
    from meshwright.comm.flight_recorder_file import read_flight_recorder

    found = [
        Witness(rank, read_flight_recorder(folder.flight_recorder(rank)), process)
        for rank, process in enumerate(processes)
    ]
    return explain(found), found


def test_ranks_that_wait_for_each_other_are_both_named(recorders):
    folder, (first, second) = recorders
    first.begin("all_gather", 0, 128, waits=True)
    second.begin("all_reduce", 1, 8, waits=True)
    text, found = said(folder, "sleeping", "sleeping")
    assert text == (
        "rank 0 waits in all_gather #4 of tp (128 bytes), which rank 1 has not begun; "
        "rank 1 waits in all_reduce #1 of data (8 bytes), which rank 0 has not begun"
    )
    assert mismatch(found) == ""


def test_the_first_collective_that_differs_is_named_though_later_ones_do_too(recorders):
    folder, (first, second) = recorders
    first.phase("reduce")
    for kind, size in (("all_reduce", 8), ("all_gather", 16)):
        first.end(first.begin(kind, 0, size, waits=True))
        second.end(second.begin("all_reduce", 0, 16, waits=True))
    _, found = said(folder, "sleeping", "sleeping")
    assert mismatch(found) == (
        "ranks disagree: rank 0 is in all_reduce #4 of tp (8 bytes) in step 4, reduce, "
        "but rank 1 is in all_reduce #4 of tp (16 bytes) in step 4, data"
    )


def test_a_receive_names_the_sender_that_has_not_sent(recorders):
    folder, (first, second) = recorders
    second.begin("send", 0, 32, peer=0)
    second.action("B", 1, 0)
    for _ in range(2):
        entry = first.begin("recv", 0, 32, peer=1)
    first.end(entry - 1)
    first.wait(entry)
    text, _ = said(folder, "sleeping", "stopped")
    assert text == (
        "rank 1 is stopped (SIGSTOP) in step 4, backward of microbatch 0 on stage 1; "
        "rank 0 waits in recv #2 of tp from rank 1 (32 bytes), which rank 1 has not begun"
    )


def test_silent_gone_and_late_ranks_are_told_apart(recorders, tmp_path):
    folder, (first, second) = recorders
    second.phase("update")
    text, _ = said(folder, "running", "gone")
    assert "rank 0 is silent for" in text
    assert "in step 4, data (running)" in text
    assert "rank 1 is gone, last seen in step 4, update" in text
    second.phase("end")
    text, _ = said(folder, "running", "gone")
    assert "rank 1 exited at the end of the run" in text
    first.begin("all_reduce", 0, 8, waits=True)
    folder.flight_recorder(1).unlink()
    text, _ = said(folder, "sleeping", "running")
    assert text == "rank 1 has not begun; rank 0 waits in all_reduce #4 of tp (8 bytes)"


def test_the_watchdog_waits_for_the_last_move_of_any_rank(recorders, clock):
    folder, (first, _) = recorders
    watchdog, off = (Watchdog(folder, 2, seconds, clock) for seconds in (30.0, 0))
    pids = [os.getpid(), os.getpid()]
    assert watchdog.look(pids) is None
    clock.now += 20
    first.phase("update")
    assert watchdog.look(pids) is None
    clock.now += 29
    assert watchdog.look(pids) is None
    clock.now += 1
    hang = watchdog.look(pids)
    assert hang.silent_s == 30
    assert hang.cause.startswith("no rank has done anything for 30.0s: rank 0 is silent for 30.0s")
    assert off.look(pids) is None


def test_ranks_have_the_longest_limit_of_the_parts_that_they_are_in(recorders, clock):
    folder, (first, second) = recorders
    limits = {"setup": 200.0, "step": 10.0, "save": 60.0, "eval": 0.0}
    watchdog = Watchdog(folder, 2, 30.0, clock, hang_of=limits)

    def hangs_after(seconds):
        assert watchdog.look([os.getpid()] * 2) is None
        clock.now += seconds - 1
        assert watchdog.look([os.getpid()] * 2) is None
        clock.now += 1
        return watchdog.look([os.getpid()] * 2) is not None

    first.phase("load")
    assert hangs_after(200)
    for step in (4, 5):
        clock.now += 1
        for recorder in (first, second):
            recorder.step(step)
    assert hangs_after(10)
    first.phase("save")  # for which the other one waits
    assert hangs_after(60)
    second.phase("eval")
    assert not hangs_after(10_000)


@pytest.mark.parametrize(
    ("first_waits", "second_waits", "slow"),
    [
        (0.6, 0.1, 1),  # seconds of a step of one second
        (0.1, 0.6, 0),
        (0.6, 0.6, None),  # both wait alike
        (0.4, 0.1, None),  # for less than half of the step
        (0.6, 0.4, None),  # for less than twice as long as the other
    ],
)
def test_a_slow_rank_is_the_one_that_does_not_wait(
    recorders, clock, first_waits, second_waits, slow
):
    folder, both = recorders
    watchdog = Watchdog(folder, 2, 0, clock)
    watchdog.look([1, 1])

    def steps(count):
        for _ in range(count):
            began = clock.now
            for recorder, waits in zip(both, (first_waits, second_waits), strict=True):
                clock.now = began + 1 - waits
                entry = recorder.begin("all_reduce", 0, 8, waits=True)
                clock.now = began + 1
                recorder.end(entry)
            for recorder in both:
                recorder.step(steps.next)
            steps.next += 1

    steps.next = 5
    steps(1)
    assert watchdog.slow() is None  # where the comparison begins
    steps(7)
    assert watchdog.slow() is None  # too few steps to say
    steps(1)
    event = watchdog.slow()
    if slow is None:
        assert event is None
        return
    assert (event["rank"], event["from_step"], event["step"]) == (slow, 5, 13)
    assert event["others_wait"] == pytest.approx(0.6)
    assert event["waits"] == pytest.approx(0.1)


def test_the_machine_is_examined(tmp_path):
    found = {one.name: one for one in examine_machine(clean_environ(), tmp_path)}
    assert [one for one in found.values() if one.state == "bad"] == []
    for name in ("meshwright", "torch", "devices", "load", "memory", "open files", "interface"):
        assert found[name].text
    assert found["port"].text.startswith("127.0.0.1:")
    assert "can be written" in found["log.dir"].text


def test_a_config_is_examined_and_leaves_nothing_behind(config, tmp_path):
    found = {one.name: one for one in examine_config(config(), clean_environ())}
    assert {one.state for one in found.values()} == {"ok"}
    assert found["layout"].text == "dp2 mb2 on 2 ranks, 51.4k parameters"
    assert "training tokens" in found["data"].text
    assert found["checkpoints"].text.startswith("3 steps of 601.88 KiB need 1.76 MiB; ")
    assert not (tmp_path / "runs").exists()
    broken = config(
        *("layout.tp=2", "data.source=/no/such.txt", "log.wandb=x", "cluster.memory=1KiB"),
        "checkpoint.keep=1000000000",
    )
    found = {one.name: one for one in examine_config(broken, clean_environ())}
    assert found["layout"].text.startswith("layout.tp = 2 must divide model.n_kv_heads = 1")
    assert found["data"].text.startswith("no such file or folder: /no/such.txt")
    assert "wandb is not installed" in found["trackers"].text
    assert found["checkpoints"].text.endswith("checkpoint.dir or log.dir sets where")
    assert {one.state for one in found.values()} == {"bad"}
    tight = {one.name: one for one in examine_config(config("cluster.memory=1KiB"), {})}
    assert "cluster.memory = 1.00 KiB is less than a rank needs" in tight["peak"].text
    words = ["train.batch=64", "train.seq_len=1024", "layout.microbatch=32"]
    words.append("cluster.memory=64MiB")
    over = {one.name: one for one in examine_config(config(*words), {})}
    assert "but cluster.memory = 64.00 MiB" in over["peak"].text


def test_a_run_that_is_done_and_one_whose_rank_was_killed(config, tmp_path, capsys):
    words = ["layout.dp_replicate=2", "checkpoint.every=2", "checkpoint.restarts=0"]
    environ = clean_environ() | {"FAULT": "1:backward:3:kill"}
    with pytest.raises(RankFailed):
        train(config(*words), environ)
    folder = tmp_path / "runs" / "run"
    found = diagnose(folder)
    assert (found.state, found.last_step, found.is_well) == ("failed", 2, False)
    assert found.reason.startswith("rank 1 was killed by SIGKILL, possibly by the system because")
    assert found.reason.endswith("in step 3, backward of microbatch 0 on stage 0")
    assert found.good == f"step 2, {folder}/checkpoints/step-00000002"
    capsys.readouterr()
    assert main(["doctor", str(folder)]) == 1
    assert "failed. " in capsys.readouterr().out
    events = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("\n".join(events[:-1]) + "\n")  # no supervisor told of it
    assert diagnose(folder).reason.startswith(
        "rank 0 is gone, last seen in step 3, reduce, inside all_reduce #"
    )
    JsonLines(folder / "events.jsonl").write({"event": "end", "step": 4, "stopped": True})
    for rank in (0, 1):
        (folder / "logs" / f"rank-{rank}.failure.json").unlink(missing_ok=True)
    assert main(["doctor", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["state"] == "stopped"
    assert [rank["place"] for rank in said["ranks"]][1].startswith("step 3, backward")


def test_doctor_refuses_what_is_no_run(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path), "layout.tp=2"]) == 2


@pytest.mark.faults
def test_a_run_that_hangs_is_explained_while_it_does(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "SILENT_S", 1.0)
    monkeypatch.setenv("FAULT", "1:forward:5:stop")
    process = start_train(corpus, tmp_path, "train.steps=100000", "layout.dp_replicate=2")
    folder = tmp_path / "runs" / "run"
    try:
        wait_for_steps(folder, process)
        deadline = time.monotonic() + 30
        while (found := diagnose(folder)).state == "running" and time.monotonic() < deadline:
            time.sleep(0.1)
        assert found.state == "silent"
        assert "rank 1 is stopped (SIGSTOP) in step 5, forward" in found.reason
        assert "rank 0 waits in all_reduce #" in found.reason
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    # A rank that is killed is there until the system has taken its memory back.
    wait_for(lambda: diagnose(folder).state == "failed", "the run is seen to have failed")


def test_how_busy_the_machine_is_stays_with_the_run(config, tmp_path, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 1.0, 1.0))
    (told,) = [one for one in examine_machine({}, tmp_path) if one.name == "load"]
    machine = prepare_job(config(), clean_environ()).machine
    assert (told.state, told.text) == ("note", busy(99.0, machine.cores))
    assert machine.load == 99.0
