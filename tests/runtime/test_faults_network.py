"""A network that parts the ranks (case 27): both sides end, what was saved is whole, and goes on.

Two machines, which are network namespaces; needs root.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from meshwright.checkpoint.commit import steps, verify
from meshwright.checkpoint.weights import load_model
from runs import TINY, clean_environ, ip

pytestmark = pytest.mark.faults
TIMEOUT_S = 8


@pytest.mark.case(27)
@pytest.mark.timeout(300)
def test_both_sides_of_a_parted_network_end(machines, corpus, tmp_path, outcome):
    words = [
        *TINY,
        f"data.source={corpus}",
        f"data.cache={tmp_path / 'cache'}",
        f"log.dir={tmp_path / 'runs'}",
        "log.name=run",
        "layout.dp_replicate=2",
        "train.steps=100000",
        "checkpoint.every=5",
        "cluster.nodes=2",
        "cluster.devices_per_node=1",
        f"cluster.timeout={TIMEOUT_S}",
        f"cluster.hang={TIMEOUT_S - 2}",
    ]
    ranks = []
    for rank, (name, _, link) in enumerate(machines):
        environ = {
            **clean_environ(),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": machines[0][1],
            "MASTER_PORT": "29533",
            "GLOO_SOCKET_IFNAME": link,
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "meshwright", "train", *words]
        with (tmp_path / f"rank-{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
    said = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    try:
        root = tmp_path / "runs" / "run" / "checkpoints"
        deadline = time.monotonic() + 120
        while not steps(root):
            assert all(rank.poll() is None for rank in ranks), said[0].read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        name, _, link = machines[0]
        ip("netns", "exec", name, "ip", "link", "set", link, "down")
        parted = time.monotonic()
        codes = [rank.wait(60) for rank in ranks]
        seconds = time.monotonic() - parted
        assert seconds < 4 * TIMEOUT_S + 10
    finally:
        for rank in ranks:
            rank.kill()
    assert all(code not in (0, 4) for code in codes), [path.read_text()[-2000:] for path in said]
    for code, path in zip(codes, said, strict=True):
        lines = [line for line in path.read_text().splitlines() if "Error" in line]
        outcome.add(code, lines[-1], seconds)
    newest = steps(root)[-1]
    verify(newest)
    assert load_model(newest) is not None
    events = (tmp_path / "runs" / "run" / "events.jsonl").read_text().splitlines()
    done = [json.loads(line) for line in events]
    last = max(event["step"] for event in done if event["event"] == "save")
    assert newest.name == f"step-{last:08d}"  # nobody wrote on


def start_torchrun(machines, words, folder, name):
    """Start torchrun with two ranks on each machine; returns its processes."""
    started = []
    for number, (host, _, link) in enumerate(machines):
        command = [
            *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number)),
            *("--master-addr", machines[0][1], "--master-port", "29511"),
            *("-m", "meshwright", "train", *words),
        ]
        environ = {**clean_environ(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": link}
        with (folder / f"{name}-{number}.log").open("wb") as log:
            started.append(
                subprocess.Popen(command, env=environ, stdout=log, stderr=log, process_group=0)
            )
    return started


def ended(processes, seconds):
    """Return the exit codes of processes that have to end by themselves."""
    until = time.monotonic() + seconds
    try:
        return [one.wait(max(1.0, until - time.monotonic())) for one in processes]
    finally:
        for one in processes:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)


def steps_in(events):
    if not events.is_file():
        return [0]
    found = [json.loads(line) for line in events.read_text().splitlines()]
    return [0, *(event["step"] for event in found if event["event"] == "step")]


def contents(folder):
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]


@pytest.mark.timeout(600)
def test_a_run_of_two_hosts_goes_on_bit_for_bit_after_one_was_cut_off(machines, corpus, tmp_path):
    words = [
        *TINY,
        *(f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"),
        # Tensor parallelism inside a host, data parallelism across.
        *("model.n_kv_heads=2", "layout.tp=2", "layout.dp_replicate=2", "cluster.nodes=2"),
        *(f"log.dir={tmp_path / 'runs'}", "train.steps=400", "train.eval_every=0"),
        *("checkpoint.every=20", f"cluster.timeout={TIMEOUT_S}", f"cluster.hang={TIMEOUT_S - 2}"),
    ]
    whole = start_torchrun(machines, [*words, "log.name=whole"], tmp_path, "whole")
    assert ended(whole, 200) == [0, 0], (tmp_path / "whole-0.log").read_text()[-2000:]

    run = tmp_path / "runs" / "cut"
    cut = start_torchrun(machines, [*words, "log.name=cut"], tmp_path, "cut")
    deadline = time.monotonic() + 120
    while max(steps_in(run / "events.jsonl")) < 50:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    host, _, link = machines[1]
    ip("netns", "exec", host, "ip", "link", "set", link, "down")
    assert all(code != 0 for code in ended(cut, 150))
    assert 50 <= max(steps_in(run / "events.jsonl")) < 400

    ip("netns", "exec", host, "ip", "link", "set", link, "up")
    again = start_torchrun(machines, ["--resume", str(run)], tmp_path, "again")
    assert ended(again, 200) == [0, 0], (tmp_path / "again-0.log").read_text()[-2000:]
    last = "checkpoints/step-00000400"
    assert contents(run / last) == contents(tmp_path / "runs" / "whole" / last)
