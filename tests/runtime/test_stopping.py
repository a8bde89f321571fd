"""A run that is asked to stop: what it saves, what it says, and what it no longer waits for."""

import io
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from faulty import events_of, last_files, of, start_train, wait_for, wait_for_phase, wait_for_steps
from meshwright.checkpoint.commit import step_name
from meshwright.cli import main
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.flight_recorder_file import read_flight_recorder
from meshwright.errors import EXIT_STOPPED, StoppedOnRequest
from meshwright.report.record import read_run
from meshwright.report.run_words import verdict
from meshwright.runtime import certificate
from meshwright.runtime.run import Run
from meshwright.runtime.supervise import supervisor
from meshwright.runtime.supervise.attempts import Stopping, going_on, has_made_no_progress
from meshwright.runtime.supervise.diagnosis import diagnose
from meshwright.runtime.supervise.supervisor import StopSignals, Timing, supervise
from meshwright.runtime.supervise.view import Lasting, open_view
from meshwright.training.held_out import Interruptible
from meshwright.training.run_folder import read_job
from run_folders import write_run
from runs import TINY, clean_environ, rank_pids

LONG = ["train.steps=100000", "layout.dp_replicate=2"]
# Thousands of batches of the half that is held out: many seconds, on any machine.
EVALUATES = ["train.eval_batches=4000", "data.validation=0.5", "train.seq_len=64"]
APART_S = 0.7  # Ctrl-C that is meant as another one


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    text = (f"story {n}: the cat sat on mat {n}. " * 20 for n in range(3000))
    file.write_text("<|endoftext|>".join(text))
    return file


def folder_of(tmp_path):
    return tmp_path / "runs" / "run"


def end(process, timeout_s=100.0):
    """Return the lines that a command has printed, once it has ended."""
    out, _ = process.communicate(timeout=timeout_s)
    return out.splitlines()


def saved_where_it_stopped(folder):
    """Look at the end of a run that was stopped; returns its step."""
    last = events_of(folder)[-1]
    assert (last["event"], last["stopped"]) == ("end", True)
    last_files(folder, last["step"])
    assert rank_pids(folder) == []
    return last["step"]


# --- evaluations -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    ["SIGINT", *(pytest.param(name, marks=pytest.mark.faults) for name in ("SIGTERM", "SIGHUP"))],
)
@pytest.mark.case(44)
def test_a_stop_leaves_an_evaluation_and_says_how_to_go_on(
    long_corpus, tmp_path, number, capsys, outcome
):
    words = [*LONG, *EVALUATES, "train.eval_every=1"]
    process, folder = start_train(long_corpus, tmp_path, *words), folder_of(tmp_path)
    wait_for_phase(folder, process, "eval")
    process.send_signal(getattr(signal, number))
    asked = time.monotonic()
    lines = end(process)
    outcome.add(process.returncode, lines[-1].replace(str(folder), "RUN"), time.monotonic() - asked)
    assert process.returncode == EXIT_STOPPED, lines
    assert of(events_of(folder), "eval") == []
    step = saved_where_it_stopped(folder)
    (answer,) = [line for line in lines if line.startswith("stopping: ")]
    assert answer.startswith(f"stopping: leaving the evaluation, saving step {step}; Ctrl-C again")
    assert lines[-1] == f"to resume: meshwright train --resume {folder}"
    if number == "SIGINT":  # the last line is a command, and does it
        command, *rest = shlex.split(lines[-1].removeprefix("to resume: "))
        more = [f"train.steps={step + 1}", "train.eval_every=0"]
        assert (command, main([*rest, *more])) == ("meshwright", 0)
        assert f"done after {step + 1} steps" in capsys.readouterr().out


@pytest.mark.faults
def test_a_stop_in_the_last_evaluation_finds_all_saved(long_corpus, tmp_path):
    words = ["train.steps=2", "layout.dp_replicate=2", *EVALUATES, "train.eval_every=2"]
    process, folder = start_train(long_corpus, tmp_path, *words), folder_of(tmp_path)
    wait_for_phase(folder, process, "eval")
    last_files(folder, 2)  # before the evaluation, which may take longer than a grace period
    process.send_signal(signal.SIGTERM)
    lines = end(process)
    assert process.returncode == EXIT_STOPPED, lines
    assert saved_where_it_stopped(folder) == 2
    assert lines[-1] == f"all 2 steps are saved; to evaluate: meshwright eval {folder}"


class Alone:
    """A world of one rank whose clock goes on by 0.1 s a batch."""

    size = 1

    def __init__(self):
        self.votes, self.now = [], 0.0

    def sum_on_host(self, values):
        self.votes.append(self.now)
        return values

    def clock(self):
        return self.now


def test_ranks_vote_twice_a_second_and_leave_together():
    world, read = Alone(), []
    batches = Interruptible(range(1000), world, lambda: world.now > 3.0, world.clock)
    for batch in batches:
        read.append(batch)
        world.now += 0.1
    assert batches.is_broken_off
    assert read == list(range(len(read)))
    assert 3.0 < world.now < 3.6
    gaps = [round(b - a, 3) for a, b in zip(world.votes, world.votes[1:], strict=False)]
    assert gaps[0] == 0.1
    assert all(0.3 < gap < 0.6 for gap in gaps[3:])


def test_an_evaluation_is_a_phase_of_its_own(tmp_path):
    """A flight recorder that said "forward" would tell that the step is not done."""
    recorder = FlightRecorder.open(tmp_path / "rank-0.recorder", 0, 1)
    recorder.step(1)
    recorder.action("F", 0, 0)
    at = [read_flight_recorder(tmp_path / "rank-0.recorder")]
    recorder.phase("eval")
    recorder.action("F", 0, 3)
    at.append(read_flight_recorder(tmp_path / "rank-0.recorder"))
    assert [one.phase for one in at] == ["forward", "eval"]
    assert at[1].place() == "step 1, eval of microbatch 3 on stage 0"
    assert [has_made_no_progress([one, None]) for one in at] == [True, False]


# --- how long, and how often asked -----------------------------------------------------------


def test_ranks_that_save_have_as_long_as_they_move(monkeypatch):
    """An hour by the clock; a fixed limit would end them."""
    looks = iter(range(1000))
    now = [0.0]

    def sleep(seconds):
        now[0] += 36.0

    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(supervisor, "time", clock)
    asked = []
    ranks = SimpleNamespace(
        codes=lambda: [None if next(looks) < 100 else EXIT_STOPPED],
        ask_to_stop=lambda: asked.append(now[0]),
    )
    assert supervise(ranks, lambda: None, Timing(), lambda: True) == EXIT_STOPPED
    assert len(asked) == 1
    assert now[0] == 3600.0


def test_signals_that_come_together_are_one_request():
    with StopSignals() as signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert (signals.asked, signals.repeats) == (True, 0)
        time.sleep(APART_S)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler that asks again does not insist
        assert signals.repeats == 0
        time.sleep(APART_S)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.repeats == 1


def test_nohup_is_heeded():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def interrupt(process):
    process.send_signal(signal.SIGINT)
    time.sleep(APART_S)


@pytest.mark.faults
@pytest.mark.case(44)
def test_a_second_ctrl_c_does_not_cut_a_save_short(corpus, tmp_path, outcome):
    words = [*LONG, "checkpoint.every=1"]
    process = start_train(corpus, tmp_path, *words, FAULT="1:save:2:sleep=3")
    folder = folder_of(tmp_path)
    wait_for(lambda: (folder / "checkpoints" / "latest").is_file(), "a step", process)
    wait_for_phase(folder, process, "save")
    asked = time.monotonic()
    interrupt(process)
    interrupt(process)
    lines = end(process)
    assert process.returncode == EXIT_STOPPED, lines
    said = "step 2 is being saved: Ctrl-C once more ends that, too"
    assert said in lines
    outcome.add(process.returncode, said, time.monotonic() - asked)
    assert saved_where_it_stopped(folder) == 2


@pytest.mark.faults
@pytest.mark.case(44)
def test_a_second_ctrl_c_in_a_step_says_what_is_lost(corpus, tmp_path, outcome):
    words = [*LONG, "checkpoint.every=2"]
    process = start_train(corpus, tmp_path, *words, FAULT="1:update:4:sleep=60")
    folder = folder_of(tmp_path)
    wait_for_phase(folder, process, "update")
    wait_for(
        lambda: read_flight_recorder(folder / "logs" / "rank-1.recorder").step == 4,
        "step 4",
        process,
    )
    asked = time.monotonic()
    interrupt(process)
    interrupt(process)
    lines = end(process)
    outcome.add(process.returncode, lines[-2], time.monotonic() - asked)
    assert process.returncode == 3, lines
    assert lines[-2:] == [
        "meshwright train: ended at once, as asked again: step 2 is the newest that is saved, "
        "steps lost: 1",
        f"to resume: meshwright train --resume {folder}",
    ]
    assert rank_pids(folder) == []


@pytest.mark.faults
def test_a_stop_before_the_first_step_is_done_ends_at_once(corpus, tmp_path):
    """Nothing is lost: a batch that does not come, or a compiler, is not waited for."""
    process = start_train(corpus, tmp_path, *LONG, FAULT="1:data:1:sleep=60")
    folder = folder_of(tmp_path)
    wait_for_phase(folder, process, "data")
    process.send_signal(signal.SIGTERM)
    lines = end(process, timeout_s=40.0)
    assert process.returncode == EXIT_STOPPED, lines
    assert "stopped on request before the first step was done: there is nothing to save" in lines
    assert lines[-1] == f"to start over: meshwright train {folder}/config.toml log.name=NEW"
    assert verdict(read_run(folder))[0] == "Stopped on request after step 0 of 100000."
    assert diagnose(folder).state == "stopped"
    assert rank_pids(folder) == []


def test_a_stop_after_the_last_save_names_no_step_beyond_it(config):
    """A rank was killed there, and the run is asked to stop before its ranks are back."""
    job = read_job(write_run(config("layout.dp_replicate=1"), profile=False))
    (job.checkpoints / step_name(job.config.train.steps)).mkdir(parents=True)
    asked = SimpleNamespace(asked=True, repeats=0)
    with pytest.raises(StoppedOnRequest, match=r"after the last step: all 4 steps are saved$"):
        Stopping(job, asked, print).look()
    out = io.StringIO()
    view = open_view(Lasting(out))
    view._start = {"event": "start", "from_step": 4, "steps": 4}
    view.write({"event": "end", "step": 4, "loss": 1.0, "stopped": True})
    assert out.getvalue() == "stopped on request after the last step\n"


# --- who shows it ----------------------------------------------------------------------------


@pytest.mark.faults
def test_a_reader_that_goes_does_not_end_the_run(corpus, tmp_path):
    """`| tee log` ends by the same Ctrl-C, `| head` by itself."""
    words = [*TINY, *LONG, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += [f"log.dir={tmp_path / 'runs'}", "log.name=run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(),
    )
    folder = folder_of(tmp_path)
    assert process.stdout.readline().startswith("run folder")
    process.stdout.close()
    wait_for_steps(folder, process)
    process.send_signal(signal.SIGINT)
    error = process.stderr.read()
    assert process.wait(100) == EXIT_STOPPED, error
    saved_where_it_stopped(folder)
    assert error.splitlines()[-1] == f"to resume: meshwright train --resume {folder}"


@pytest.mark.faults
@pytest.mark.case(44)
def test_a_terminal_that_closes_ends_in_a_save(corpus, tmp_path, outcome):
    """Its SIGHUP asks to stop, and nothing can be written to it any more."""
    words = [*TINY, *LONG, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += [f"log.dir={tmp_path / 'runs'}", "log.name=run"]
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=clean_environ(),
    )
    os.close(theirs)
    folder = folder_of(tmp_path)
    events = folder / "events.jsonl"
    while not (events.is_file() and '"event": "step"' in events.read_text()):
        os.read(terminal, 4096)
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    asked = time.monotonic()
    assert process.wait(100) == EXIT_STOPPED
    step = saved_where_it_stopped(folder)
    outcome.add(EXIT_STOPPED, f"step {step} is saved", time.monotonic() - asked)


def test_what_is_written_to_a_lost_output_goes_nowhere(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        out = Lasting(pipe)
        for _ in range(3):
            assert out.write("text\n") == 5
        assert out.is_lost


@pytest.mark.faults
def test_ctrl_c_under_torchrun_saves(corpus, tmp_path):
    """Torchrun hands SIGINT itself to its ranks, and gives them 30 s."""
    words = [*TINY, "train.steps=100000", f"data.source={corpus}"]
    words += [f"data.cache={tmp_path / 'cache'}", f"log.dir={tmp_path / 'runs'}", "log.name=run"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [sys.executable, *torchrun, "-m", "meshwright", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**clean_environ(), "OMP_NUM_THREADS": "1"},
    )
    folder = folder_of(tmp_path)
    wait_for_steps(folder, process)
    process.send_signal(signal.SIGINT)
    lines = end(process)
    saved_where_it_stopped(folder)
    go_on = f"to resume: torchrun --nproc-per-node 2 -m meshwright train --resume {folder}"
    assert go_on in lines


def test_the_command_to_go_on_follows_the_run(go):
    folder, _, _ = go(None, "train.steps=2")
    job = read_job(folder)
    assert going_on(job) == f"all 2 steps are saved; to evaluate: meshwright eval {folder}"


def test_a_certificate_is_not_made_of_runs_that_were_stopped(config, tmp_path, monkeypatch):
    stopped = Run(tmp_path, EXIT_STOPPED)
    monkeypatch.setattr(certificate, "train", lambda *words, **more: stopped)
    with pytest.raises(StoppedOnRequest, match="not compared"):
        certificate._Runs(config(), tmp_path, {}, lambda text: None).begin("whole")
