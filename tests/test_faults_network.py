"""A network that parts the ranks (case 27): both sides end, and what was saved is whole.

Two ranks as torchrun would place them on two machines, which are network namespaces; needs root.
"""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from meshwright.checkpoint.commit import steps, verify
from meshwright.checkpoint.weights import load_model
from runs import TINY, clean_environ

pytestmark = pytest.mark.faults
TIMEOUT_S = 8


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def machines():
    """Two namespaces with a link between them, by name, address and interface."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = f"{os.getpid() % 10000}"
    names, links = (f"mw{tag}a", f"mw{tag}b"), (f"v{tag}a", f"v{tag}b")
    addresses = ("10.77.0.1", "10.77.0.2")
    if ip("netns", "add", names[0]).returncode:
        pytest.skip("this system makes no network namespaces")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, addresses, strict=True):
            ip("link", "set", link, "netns", name)
            inside = ("netns", "exec", name, "ip")
            ip(*inside, "addr", "add", f"{address}/24", "dev", link)
            ip(*inside, "link", "set", link, "up")
            ip(*inside, "link", "set", "lo", "up")
        yield list(zip(names, addresses, links, strict=True))
    finally:
        for name in names:
            ip("netns", "del", name)


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
