"""Runs with a fault in them, and what they leave."""

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
from meshwright.comm.flight_recorder_file import read_flight_recorder
from meshwright.runtime.session import train
from outcomes import outcome_of
from runs import TINY, clean_environ, faulty_worker, rank_pids

STEPS = 6
RUN = ["layout.dp_replicate=2", f"train.steps={STEPS}", "checkpoint.every=2", "model.dropout=0.1"]
TENSOR = ["layout.tp=2", "layout.dp_replicate=1", "model.n_kv_heads=2"]
ZERO = ["layout.dp_shard=2", "layout.dp_replicate=1", "layout.zero=3"]
HANG = ["cluster.hang=3", "cluster.timeout=60"]


def train_with(
    config, runs, outcome, fault, *overrides, bound_s=90.0, error=None, body=None, name="run"
):
    """Train with a fault, or a worker with a body of its own; returns folder, text and events.

    `error` is what the run is to end with.
    """
    environ = clean_environ() | ({"FAULT": fault} if fault else {})
    more = {} if body is None else {"command": faulty_worker(body)}
    out, started = io.StringIO(), time.monotonic()
    asked = config(*RUN, f"log.name={name}", *overrides)
    folder = runs / name
    if error is None:
        assert train(asked, environ, out, **more).exit_code == 0, out.getvalue()
        text, code = out.getvalue(), 0
    else:
        try:
            ended_with = train(asked, environ, out, **more)
        except error as caught:
            text, code = str(caught), caught.exit_code
        else:
            pytest.fail(f"no {error.__name__}, but {ended_with}:\n{out.getvalue()}")
    ended = time.time()
    assert time.monotonic() - started < bound_s
    assert rank_pids(folder) == []
    told = events_of(folder)
    if fault or body:
        outcome.add(*outcome_of(code, text, told, ended))
    return folder, text, told


def events_of(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def of(events, kind):
    return [event for event in events if event["event"] == kind]


def last_files(folder, step=STEPS):
    path = folder / "checkpoints" / step_name(step)
    verify(path)
    assert load_model(path) is not None
    return read_manifest(path)["files"]


def flip(path, place):
    """Flip a bit of a file: in a token store, to another legal id."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def start_train(corpus, tmp_path, *overrides, **environ):
    """Start the command in a process of its own; its folder is `runs/run`."""
    words = [*TINY, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += [f"log.dir={tmp_path / 'runs'}", "log.name=run", *overrides]
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environ() | environ,
    )


def send(process, signum, timeout_s=120.0):
    """Send a signal; returns all output and the seconds until the process had ended."""
    started = time.monotonic()
    process.send_signal(signum)
    out, _ = process.communicate(timeout=timeout_s)
    return out, time.monotonic() - started


def wait_for(happened, what, process=None, timeout_s=90.0):
    """Wait until `happened` returns something true, and return it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := happened():
            return found
        assert process is None or process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def wait_for_steps(folder: Path, process):
    events = folder / "events.jsonl"
    wait_for(
        lambda: events.is_file() and '"event": "step"' in events.read_text(), "a step", process
    )


def wait_for_phase(folder, process, phase):
    def is_there():
        reading = read_flight_recorder(folder / "logs" / "rank-1.recorder")
        return reading is not None and reading.phase == phase

    wait_for(is_there, f"rank 1 in {phase}", process)


def wait_until_gone(folder):
    """Wait until no rank of a run is left; returns the seconds it took."""
    started = time.monotonic()
    wait_for(lambda: not rank_pids(folder), "the ranks' end", timeout_s=10.0)
    return time.monotonic() - started


def end_supervisor(process):
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def listening_addresses(pids: list[int]) -> set[str]:
    """The addresses on which some processes listen, from the kernel's tables."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                inodes.add(match[1])
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = bytes.fromhex(fields[1].split(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                address = socket.inet_ntop(family, b"".join(words))
                found.add(address.removeprefix("::ffff:"))
    return found
