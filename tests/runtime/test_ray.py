"""Jobs on Ray: what needs no Ray, and two ranks on a cluster of two nodes where it is installed."""

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from meshwright.cli import main
from meshwright.comm.rendezvous import Rendezvous
from meshwright.comm.secret import Secret
from meshwright.errors import RankFailed
from meshwright.runtime.jobs import on_ray
from meshwright.runtime.jobs.job import JobSpec
from meshwright.runtime.jobs.on_ray import (
    NodeLost,
    NodeRanks,
    bundles,
    environments,
    follow,
    strategy,
)
from runs import TINY, clean_environ, is_running

HAS_RAY = importlib.util.find_spec("ray") is not None


def job(**changes):
    return JobSpec(
        **{"name": "big", "arguments": ("run.toml",), "nodes": 2, "per_node": 4, **changes}
    )


def test_a_bundle_is_a_node():
    assert bundles(job(device="cuda", cores=6)) == [{"CPU": 24.0, "GPU": 4.0}] * 2
    assert bundles(job(device="cpu", nodes=1)) == [{"CPU": 4.0}]
    assert strategy(job(device="cpu", nodes=1)) == "STRICT_PACK"
    assert strategy(job(device="cpu")) == "PACK"


def test_ranks_are_told_what_torchrun_would_tell_them():
    known = {"secret": "0123456789abcdef"}
    told = [
        Rendezvous.from_environment(environ)
        for node in range(2)
        for environ in environments(
            job(device="cuda", **known), node, ("10.0.0.1", 4711), 2, "ray-big-01"
        )
    ]
    met = {"attempt": 2, "job": "ray-big-01", "secret": Secret(known["secret"].encode())}
    assert told == [Rendezvous(rank, 8, rank % 4, 4, "10.0.0.1", 4711, **met) for rank in range(8)]


def test_the_job_is_a_command_that_runs_where_it_was_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*TINY, "data.source=stdlib", "cluster.devices_per_node=1", "layout.dp_replicate=2"]
    assert main(["launch", "ray", *words, "--nodes", "2", "--cpus", "3", "--restarts", "1"]) == 0
    line = shlex.split(capsys.readouterr().out)
    assert line[:-1] == ["ray", "job", "submit", "--no-wait", "--", "sh", "-c"]
    inside = shlex.split(line[-1])
    assert inside[:6] == ["cd", str(tmp_path), "&&", "meshwright", "launch", "ray"]
    assert inside[-2:] == ["3", "--submit"]
    assert set(words) < set(inside)
    assert "cluster.nodes=2" in inside


def test_ranks_have_what_steers_the_network_from_whoever_submits():
    assert on_ray.passed({"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "e", "HOME": "/root"}) == {
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "e",
    }


class Scripted:
    """Nodes whose ranks end as they are told to."""

    def __init__(self, *codes):
        self.script, self.asked, self.ended = list(codes), False, False

    def codes(self):
        step = self.script.pop(0)
        if step is None:
            raise NodeLost("a node was lost")
        return step

    def ask_to_stop(self):
        self.asked = True

    def end(self):
        self.ended = True


@pytest.mark.parametrize(
    ("attempts", "code"),
    [
        ([[[None, None], [0, 0]]], 0),
        ([[[None, -9]], [[0, 0]]], 0),  # a rank was killed: all start again
        ([[None], [[0, 0]]], 0),  # a node was lost
        ([[[None, 2]]], 2),  # refused: another attempt would change nothing
        ([[[None, 5]]], 5),
        ([[[4, None], [4, 4]]], 4),
    ],
)
def test_a_failure_anywhere_ends_or_restarts_all(attempts, code, monkeypatch):
    monkeypatch.setattr(on_ray, "_POLL_S", 0)
    made = []

    def start(number):
        made.append(Scripted(*attempts[number]))
        return made[-1]

    assert follow(start, 3, 1.0, lambda: False) == code
    assert len(made) == len(attempts)
    assert all(one.ended for one in made)


def test_restarts_are_limited(monkeypatch):
    monkeypatch.setattr(on_ray, "_POLL_S", 0)
    made = []
    with pytest.raises(RankFailed, match=r"after 2 restarts; the last time .*\[3, None\]"):
        follow(lambda number: made.append(number) or Scripted([3, None]), 2, 1.0, lambda: False)
    assert made == [0, 1, 2]


def test_a_job_that_is_asked_to_stop_saves(monkeypatch):
    monkeypatch.setattr(on_ray, "_POLL_S", 0)
    nodes = Scripted([None], [4])
    assert follow(lambda number: nodes, 3, 10.0, lambda: True) == 4
    assert nodes.asked


@pytest.mark.slow
def test_ranks_end_with_the_actor_that_started_them(tmp_path):
    """What holds the other end of their pipe is killed, as Ray kills an actor."""
    code = (
        "import sys, time; from meshwright.runtime.jobs.on_ray import NodeRanks, environments\n"
        "from meshwright.runtime.jobs.job import JobSpec\n"
        "job = JobSpec('big', (), 2, 1, 'cpu')\n"
        "node = NodeRanks(sys.argv[1])\n"
        "node.start(sys.argv[2:], environments(job, 1, ('127.0.0.1', node.port()), 0, 'x'))\n"
        "print(node._processes[0].pid, flush=True); time.sleep(100)\n"
    )
    words = [*TINY, "layout.dp_replicate=2"]
    actor = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), *words],
        stdout=subprocess.PIPE,
        env=clean_environ(),
    )
    pid = int(actor.stdout.readline())
    time.sleep(1)
    assert is_running(pid)
    os.kill(actor.pid, signal.SIGKILL)
    actor.wait()
    deadline = time.monotonic() + 120
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_extra_is_named_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    words = [*TINY, "data.source=stdlib", "cluster.devices_per_node=1", "layout.dp_replicate=1"]
    assert main(["launch", "ray", *words, "--submit"]) == 2
    assert "pip install 'meshwright[ray]'" in capsys.readouterr().err


def test_a_node_tells_a_free_port_and_how_its_ranks_ended(tmp_path):
    node = NodeRanks(str(tmp_path))
    assert 1024 < node.port() < 65536
    node.start(["model.dmi=3"], [{"RANK": "0"}])
    deadline = time.monotonic() + 30
    while node.codes() == [None]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert node.codes() == [2]
    node.end()


@pytest.fixture
def two_nodes(monkeypatch):
    """A Ray cluster of two nodes with a core each, on this machine."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install 'meshwright[ray]'")
def test_two_ranks_train_on_two_nodes_of_ray(two_nodes, corpus, tmp_path):
    run = tmp_path / "runs" / "job"
    words = [*TINY, "train.steps=60", "checkpoint.every=5", "cluster.devices_per_node=1"]
    words += [f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}", "layout.dp_replicate=2"]
    words += [f"log.dir={run.parent}", f"log.name={run.name}", "cluster.timeout=60"]
    words += ["cluster.hang=30"]
    options = ["--nodes", "2", "--submit", "--address", two_nodes.address]
    fault = {"FAULT": "1:forward:12:kill"}  # a rank dies once; all start again and go on
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "launch", "ray", *words, *options],
        capture_output=True,
        text=True,
        env={**clean_environ(), **fault},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["world"] for event in events if event["event"] == "start"] == [2, 2]
    (again,) = [event for event in events if event["event"] == "restart"]
    assert (again["attempt"], again["from_step"]) == (1, 10)
    assert events[-1]["event"] == "end"
    assert events[-1]["step"] == 60
