"""Ranks on several nodes: numbered so that the mesh lies on links as it was planned."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.weights import load_model
from meshwright.comm.rendezvous import Rendezvous, Seat, own_seat, seated
from meshwright.cost.network import place
from meshwright.errors import ConfigError
from meshwright.layout import Mesh
from meshwright.runtime.machines.machine import on_nodes
from meshwright.runtime.session import train
from meshwright.runtime.supervise.supervisor import listen_on_loopback
from meshwright.spec.loading import load_config
from runs import TINY, clean_environ


def seats(*places, local_size=2):
    """Seats by rank, each as `node.local_rank`."""
    split = [one.split(".") for one in places]
    return [Seat(node, "boot", int(local), local_size) for node, local in split]


@pytest.mark.parametrize(
    ("places", "numbers"),
    [
        (("a.0", "a.1", "b.0", "b.1"), [0, 1, 2, 3]),
        (("a.0", "b.0", "a.1", "b.1"), [0, 2, 1, 3]),  # --distribution=cyclic
        (("b.0", "a.0", "a.1", "b.1"), [0, 2, 3, 1]),  # plane, or by hand: rank 0 stays
        (("a.0", "a.1", "a.0", "a.1"), [0, 1, 2, 3]),  # two launchers on one machine
        (("a.0", "a.0", "a.1", "a.1"), [0, 2, 1, 3]),
    ],
)
def test_ranks_are_numbered_node_by_node(places, numbers):
    assert seated(seats(*places)) == numbers


def test_nodes_of_one_name_are_told_apart_by_when_they_booted():
    cyclic = [Seat("localhost", boot, local, 2) for local in (0, 1) for boot in ("x", "y")]
    assert seated(cyclic) == [0, 2, 1, 3]


def test_inner_axes_lie_within_nodes_however_ranks_were_dealt():
    mesh, per_node, nodes = Mesh.of(pp=2, dp_shard=2, tp=2), 4, 2
    dealt = [f"n{rank % nodes}.{rank // nodes}" for rank in range(mesh.size)]
    numbers = seated(seats(*dealt, local_size=per_node))
    node_of = {number: dealt[rank].split(".")[0] for rank, number in enumerate(numbers)}
    for axis, stride in (("tp", 1), ("dp_shard", 2), ("pp", 4)):
        planned = place(mesh.degree(axis), stride, per_node)
        for rank in range(mesh.size):
            spanned = {node_of[one] for one in mesh.group(rank, (axis,))}
            assert len(spanned) == planned.nodes, axis


@pytest.mark.parametrize(
    ("dealt", "says"),
    [
        (
            [Seat(node, node, 0, 1, "127.0.1.1") for node in "ab"],
            r"leads several machines to loopback \(a 127.0.1.1; b 127.0.1.1\). Name an address",
        ),
        (
            seats("a.0", "a.1", "b.0"),
            r"every node must have as many ranks as the others, but a has ranks \[0, 1\]; b has "
            r"ranks \[2\]; nearest legal: 1 on each or 2 on each",
        ),
        (
            seats("a.0", "b.0", local_size=2),
            r"LOCAL_WORLD_SIZE = 2 must be the ranks of a node.*nearest legal: 1\. Without it",
        ),
    ],
)
def test_nodes_that_no_plan_is_for_are_refused(dealt, says):
    with pytest.raises(ConfigError, match=says):
        seated(dealt)


def test_a_node_is_what_slurm_calls_it():
    at = Rendezvous(2, 4, 1, 2, "a", 1)
    assert own_seat(at, {"SLURMD_NODENAME": "gpu07"}).node == "gpu07"
    assert own_seat(at, {}).node == os.uname().nodename


@pytest.mark.parametrize(
    ("words", "local_size", "says"),
    [
        (["cluster.nodes=3"], 2, r"cluster.nodes = 3, but .* on 2 node\(s\); .*cluster.nodes = 2"),
        (["cluster.devices_per_node=4"], 2, "has 4 devices a node, but nodes were given 2 ranks"),
        (["cluster.preset=h100-sxm"], 2, "has 8 devices a node.*cluster.devices_per_node = 2 or 8"),
        ([], 3, "4 ranks do not divide into nodes of LOCAL_WORLD_SIZE = 3; nearest legal: 2 or 4"),
    ],
)
def test_a_config_for_other_nodes_is_refused(words, local_size, says):
    at = Rendezvous(0, 4, 0, local_size, "a", 1)
    with pytest.raises(ConfigError, match=says):
        on_nodes(load_config(None, words), at)


def test_the_nodes_are_those_that_ranks_were_started_on():
    at = Rendezvous(0, 4, 0, 2, "a", 1)
    assert on_nodes(load_config(None, []), at).cluster.nodes == 2
    one = replace(at, local_size=4)
    assert on_nodes(load_config(None, ["cluster.preset=h100-sxm"]), one).cluster.nodes == 1


def on_host(name, *command):
    """Return a command as a machine of that name runs it."""
    return ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh", *command]


def train_dealt(nodes, words):
    """Train with a rank for each entry of `nodes`, in an order that a launcher may deal."""
    with listen_on_loopback(None) as listener:
        port = listener.getsockname()[1]
    started = []
    for rank, node in enumerate(nodes):
        environ = {
            **clean_environ(),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(nodes[:rank].count(node)),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = on_host(node, sys.executable, "-m", "meshwright", "train", *words)
        started.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    said = [one.communicate(timeout=120)[0].decode() for one in started]
    assert [one.returncode for one in started] == [0] * len(nodes), said


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="host names need root and unshare"
)


@pytest.mark.slow
@needs_root
def test_a_run_is_the_same_bit_for_bit_however_its_ranks_were_dealt(corpus, tmp_path):
    words = [
        *(*TINY, "model.n_kv_heads=2", "layout.tp=2", "layout.dp_replicate=2"),
        *(f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"),
        f"log.dir={tmp_path / 'runs'}",
    ]
    train_dealt(["a", "a", "b", "b"], [*words, "log.name=block"])
    train_dealt(["a", "b", "a", "b"], [*words, "log.name=cyclic"])
    weights = []
    for name in ("block", "cyclic"):
        run = tmp_path / "runs" / name
        start = json.loads((run / "events.jsonl").read_text().splitlines()[0])
        assert (start["event"], start["nodes"]) == ("start", ["a", "b"])
        files = sorted((run / "checkpoints").rglob("*.safetensors"))
        assert len(files) >= 4
        weights.append([(one.name, hashlib.sha256(one.read_bytes()).hexdigest()) for one in files])
    assert weights[0] == weights[1]


@pytest.mark.slow
@needs_root
def test_a_run_goes_on_when_it_comes_back_on_fewer_nodes(corpus, tmp_path):
    """As torchrun's `--nnodes 1:2` has it when one of two nodes is gone."""
    words = [*TINY, "train.steps=8", "checkpoint.every=2", f"data.source={corpus}"]
    words += [f"data.cache={tmp_path / 'cache'}", f"log.dir={tmp_path / 'runs'}"]
    whole = train(load_config(None, [*words, "log.name=whole"]), clean_environ())
    words.append("log.name=run")
    for attempt, size, fault in ((0, 2, "1:forward:6:kill"), (1, 1, "")):
        with listen_on_loopback(None) as listener:
            port = listener.getsockname()[1]
        ranks = []
        for rank in range(size):
            told = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "elastic",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "OMP_NUM_THREADS": "1",
                **({"FAULT": fault} if fault else {}),
            }
            command = on_host(f"node{rank}", sys.executable, "-m", "meshwright", "train", *words)
            ranks.append(subprocess.Popen(command, env={**clean_environ(), **told}))
        codes = [rank.wait(120) for rank in ranks]
        assert (codes == [0]) == (attempt == 1), codes
    run = tmp_path / "runs" / "run"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    starts = [(one["world"], one["from_step"]) for one in events if one["event"] == "start"]
    assert starts == [(2, 0), (1, 4)]
    last = {one["step"]: one for one in events if one["event"] == "step"}
    undisturbed = list(whole.events("step"))
    for kind in ("loss", "grad_norm", "lr"):
        expected = [one[kind] for one in undisturbed]
        assert [last[step][kind] for step in range(1, 9)] == pytest.approx(expected, rel=1e-5)
    weights = (dict(load_model(folder).named_parameters()) for folder in (run, whole.folder))
    for (name, ours), theirs in zip(next(weights).items(), next(weights).values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, msg=name)
    assert events[-1] == {**events[-1], "event": "end", "step": 8}


@pytest.fixture
def named(machines):
    """Two machines that know each other by name, and each itself on loopback, as Debian has it."""
    names = ("node0", "node1")
    folders = [Path("/etc/netns") / name for name, _, _ in machines]
    try:
        for own, folder in zip(names, folders, strict=True):
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost"]
            for name, (_, address, _) in zip(names, machines, strict=True):
                lines.append(f"{'127.0.1.1' if name == own else address} {name}")
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        yield [(name, *machine) for name, machine in zip(names, machines, strict=True)]
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def run_on(named, *words, **environ):
    """Run a command as one rank on each machine; returns exit codes and what they print."""
    started = []
    for rank, (name, machine, _, _) in enumerate(named):
        told = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29544",
            "OMP_NUM_THREADS": "1",
            **environ,
        }
        command = on_host(name, sys.executable, "-m", "meshwright", *words)
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", machine, *command],
                env={**clean_environ(), **told},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    said = [[text.decode() for text in one.communicate(timeout=120)] for one in started]
    return [one.returncode for one in started], said


@pytest.mark.slow
@needs_root
def test_nodes_try_the_links_between_them_before_a_first_step(named, corpus, tmp_path):
    words = [*TINY, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}", "--json"]
    words += [f"log.dir={tmp_path / 'runs'}", "cluster.devices_per_node=1", "train.batch=4"]
    codes, said = run_on(named, "doctor", *words)
    assert codes == [0, 0], said
    found = {
        one["name"]: one["text"]
        for one in json.loads(said[0][0])["findings"]
        if one["node"] == "all"
    }
    assert found["nodes"] == "node0, node1"
    # node0's own name leads to loopback; it has looked towards the other.
    (_, _, a, link_a), (_, _, b, link_b) = named
    why = "on the way to MASTER_ADDR"
    assert found["interfaces"] == f"node0 {link_a} ({a}, {why}); node1 {link_b} ({b}, {why})"
    assert found["links"].startswith("all reach each other")


@pytest.mark.slow
@needs_root
def test_ranks_meet_where_a_host_has_its_own_name_on_loopback(named, corpus, tmp_path):
    words = [*TINY, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += [f"log.dir={tmp_path / 'runs'}", "log.name=run", "layout.dp_replicate=2"]
    words += ["cluster.timeout=40", "cluster.hang=20"]
    codes, said = run_on(named, "train", *words)
    assert codes == [0, 0], said
    start = json.loads((tmp_path / "runs/run/events.jsonl").read_text().splitlines()[0])
    assert start["nodes"] == ["node0", "node1"]
