"""What NCCL has done last, kept where ranks on GPUs hang: asked for, waited for, in the run folder.

No rank here has NCCL: a stand-in does with torch's variables what ProcessGroupNCCL does.
"""

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.runtime.ranks import local
from meshwright.runtime.ranks.local import LocalRun
from meshwright.runtime.session import prepare_job
from meshwright.runtime.supervise.crash_records import ask_for_traces, trace_files, traced
from meshwright.runtime.supervise.supervisor import (
    LocalRanks,
    RanksFailed,
    Timing,
    Watchdog,
    listen_on_loopback,
    supervise,
)
from meshwright.training.run_folder import RunFolder, create
from runs import clean_environ

# Ranks that answer are not waited for longer than it takes them.
TIMING = Timing(poll_s=0.02, trace_s=30.0)
# A rank that hangs, and torch's thread in it: a pipe is looked at now and then, a dump is written.
RANK = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks for stacks
rank = os.environ["RANK"]
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
os.mkfifo(pipe)
reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
open(sys.argv[1] + rank, "w").close()
while True:
    time.sleep(0.05)
    with_word = b""
    try:
        with_word = os.read(reader, 128)
    except BlockingIOError:
        pass
    if with_word and rank != os.environ.get("MUTE"):
        with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "w") as file:
            file.write("what was done")
"""


@pytest.fixture
def folder(tmp_path):
    found = RunFolder(tmp_path / "run")
    found.log(0).parent.mkdir(parents=True)
    return found


def hanging(folder, tmp_path, environ, timing):
    """The local ranks of a hang, and a watchdog whose clock runs ahead once they are there."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ready = tmp_path / "ready-"
    command = [sys.executable, str(script), str(ready)]
    ranks = LocalRanks(command, 2, folder, environ, listen_on_loopback(None), timing)
    recorders = []

    def clock():
        if len(recorders) < 2 and all(Path(f"{ready}{rank}").exists() for rank in range(2)):
            for rank in range(2):
                recorders.append(FlightRecorder.open(folder.flight_recorder(rank), rank, 2))
        return time.monotonic() + (1000 if len(recorders) == 2 else 0)

    return ranks, Watchdog(folder, 2, 500.0, clock)


def hang(folder, tmp_path, more, timing=TIMING):
    environ = {**os.environ, **more}
    with traced(environ, folder) as found:
        ranks, watchdog = hanging(folder, tmp_path, {**environ, **found}, timing)
        with ranks, pytest.raises(RanksFailed) as failed:
            supervise(ranks, lambda: None, timing, lambda: False, watchdog)
    return failed.value


def test_a_hang_leaves_what_nccl_has_done_in_the_run_folder(folder, tmp_path):
    old = Path(f"{folder.nccl_trace}0")
    old.write_text("of a hang before")
    failed = hang(folder, tmp_path, {})
    logs = folder.log(0).parent
    told = f"of 2 ranks: torchfrtrace --prefix nccl-rank- {logs}"
    assert told in str(failed)
    assert told in failed.first.cause  # which a restart tells, too
    assert [Path(f"{folder.nccl_trace}{r}").read_text() for r in (0, 1)] == ["what was done"] * 2


@pytest.mark.slow
def test_a_rank_that_cannot_write_is_not_waited_for_long(folder, tmp_path):
    timing = replace(TIMING, trace_s=4.0)
    assert "of 1 ranks: torchfrtrace" in str(hang(folder, tmp_path, {"MUTE": "1"}, timing))


def test_what_the_user_has_said_stays(folder, tmp_path):
    own = str(tmp_path / "own-")
    assert trace_files(folder, {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": own}) == {}
    environ = {"TORCH_FR_DUMP_TEMP_FILE": own, "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": own}
    with traced(environ, folder) as found:
        assert found == {}
    with traced({}, folder) as found:
        assert set(found.values()) >= {str(folder.nccl_trace)}
        pipes = Path(found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]).parent
        assert pipes.is_dir()
        assert folder.path not in pipes.parents  # a network's disk may make no pipes
    assert not pipes.exists()
    assert ask_for_traces({}, [0, 1], 1.0) == []


class Started(Exception):
    """The ranks would start now."""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_local_ranks_on_gpus_are_started_with_it(folder, monkeypatch, device, config):
    job = prepare_job(config("layout.dp_replicate=2"), clean_environ())
    job = replace(job, machine=job.machine._replace(device=device))
    create(job)
    seen = {}

    def ranks(command, world, folder, environ, *_, **__):
        seen.update(environ)
        raise Started

    monkeypatch.setattr(local, "LocalRanks", ranks)
    run = LocalRun(job, clean_environ(), (), Timing(), [])
    view = type("View", (), {"write": lambda *_: None, "close": lambda *_: None})()
    signals = type("Signals", (), {"asked": False, "repeats": 0})()
    with contextlib.closing(listen_on_loopback(None)) as listener, pytest.raises(Started):
        run.train(listener, view, signals)
    wanted = {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_BUFFER_SIZE"}
    assert wanted & set(seen) == (wanted if device == "cuda" else set())


READER = "torch.distributed.flight_recorder.components.loader"
GLOO = """
import torch, torch.distributed as dist, torch._C._distributed_c10d as c10d
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
open(__import__("sys").argv[1], "wb").write(c10d._dump_fr_trace())
"""


@pytest.mark.slow
@pytest.mark.execs
def test_torch_finds_the_files_by_the_names_that_are_told(folder):
    """A dump of torch's own recorder, by another backend of it, in the place of NCCL's."""
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"}
    trace = f"{folder.nccl_trace}0"
    subprocess.run([sys.executable, "-c", GLOO, trace], env=environ, check=True)
    folder.log(0).write_text("beside others")
    # gloo names no groups in it, without which the command itself ends: what reads files for it.
    read_dir = importlib.import_module(READER).read_dir
    asked = Namespace(trace_dir=str(folder.log(0).parent), prefix="nccl-rank-")
    try:
        found, _ = read_dir(asked)
    finally:
        gc.enable()  # which it disables
    assert [one["rank"] for one in found.values()] == [0]
    assert "all_reduce" in str(found["nccl-rank-0"]["entries"])
