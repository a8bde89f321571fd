"""`meshwright prove -- COMMAND`: scripts that know nothing of Meshwright."""

import json
import sys
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.prove.trainers.alarms import ReplicaAlarms
from ranks import ranks
from trainer_loops import build, train

SCRIPT = """\
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trainer_loops

dist.init_process_group("gloo")
model = DistributedDataParallel(trainer_loops.Tiny())
if "wrong" in sys.argv:
    model.require_backward_grad_sync = False
trainer_loops.train(model, dist.get_world_size(), dist.get_rank(), steps=1000)
"""

# What a comparison by hand does: a step of the plain model, then gradients of a parallel one.
COMPARISON = """\
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from seeded_trainers import summing
from trainer_loops import Tiny, loss_of, rows

dist.init_process_group("gloo")
fault = sys.argv[1]


def compute_gradients(model, data_ranks, scale):
    for microbatch in range(2):
        for data_rank in data_ranks:
            ids, targets = rows(0, microbatch, data_rank)
            (loss_of(model(ids), targets, 100) * scale).backward()


plain = Tiny()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
compute_gradients(plain, range(2), 1)
optimizer.step()
Tiny().eval()(rows(0, 0, 0)[0])  # is never trained
model = DistributedDataParallel(Tiny())
if fault == "summed again":
    model.register_comm_hook(None, summing)
if fault == "missing average":
    model.require_backward_grad_sync = False
compute_gradients(model, [dist.get_rank()], 2)
if fault == "scaled":
    model.module.head.weight.grad *= 2
dist.destroy_process_group()
"""


# Ranks that the script starts by itself.
SPAWNED = """\
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trainer_loops


def work(rank, store):
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = DistributedDataParallel(trainer_loops.Tiny())
    trainer_loops.train(model, 2, rank, steps=1000)


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (f"file://{__file__}.store",), nprocs=2)
"""

TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--nproc-per-node", "2", "--standalone"),
]


def prove(tmp_path, monkeypatch, capsys, *words, source=SCRIPT, launcher=TORCHRUN):
    script = tmp_path / "train.py"
    script.write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [*launcher, str(script), *words]
    code = main(["prove", "--json", "--folder", str(tmp_path / "steps"), "--", *command])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.execs
def test_a_script_is_proven_without_a_change(tmp_path, monkeypatch, capsys):
    code, found = prove(tmp_path, monkeypatch, capsys)
    assert (code, found["passed"], found["world"]) == (0, True, 2)
    assert found["axes"] == {"dp": 2}
    assert not (tmp_path / "steps" / "issue.md").exists()


@pytest.mark.slow
@pytest.mark.execs
def test_a_wrong_script_fails_with_a_file_for_an_issue_tracker(tmp_path, monkeypatch, capsys):
    code, found = prove(tmp_path, monkeypatch, capsys, "wrong")
    assert code == 1
    assert found["faults"][0]["kind"] == "missing average"
    issue = (tmp_path / "steps" / "issue.md").read_text()
    assert "an average over dp is missing" in issue
    assert "torch" in issue


@pytest.mark.slow
@pytest.mark.execs
@pytest.mark.parametrize("fault", ["none", "summed again", "missing average", "scaled"])
def test_a_model_without_an_optimizer_is_proven_after_others(fault, tmp_path, monkeypatch, capsys):
    code, found = prove(tmp_path, monkeypatch, capsys, fault, source=COMPARISON)
    assert (code, found["refused"]) == (int(fault != "none"), None)
    assert [f["kind"] for f in found["faults"]] == ([] if fault == "none" else [fault])
    assert found["axes"] == {"dp": 2}
    assert found["notes"][0] == "before it, the program trained 1 model that agreed"
    assert "no optimizer took a step" in found["notes"][1]


@pytest.mark.slow
@pytest.mark.execs
def test_the_example_of_a_loop_on_fsdp2_is_right(tmp_path, monkeypatch, capsys):
    example = Path(__file__).parents[2] / "examples" / "fsdp2_loop.py"
    code, found = prove(tmp_path, monkeypatch, capsys, source=example.read_text())
    assert (code, found["passed"], found["axes"]) == (0, True, {"shard": 2}), found
    assert found["notes"][0] == "each of the 256 targets of a step has the same weight"


@pytest.mark.slow
@pytest.mark.execs
def test_ranks_that_the_script_spawns_are_reached(tmp_path, monkeypatch, capsys):
    launcher = [sys.executable]
    code, found = prove(tmp_path, monkeypatch, capsys, source=SPAWNED, launcher=launcher)
    assert (code, found["passed"], found["world"]) == (0, True, 2)


@pytest.mark.slow
@pytest.mark.execs
def test_a_shell_script_that_calls_torchrun_is_reached(tmp_path, monkeypatch, capsys):
    shell = tmp_path / "train.sh"
    shell.write_text(f'cd /\nexec {" ".join(TORCHRUN)} "$1" wrong\n')
    code, found = prove(tmp_path, monkeypatch, capsys, launcher=["bash", str(shell)])
    assert (code, found["faults"][0]["kind"]) == (1, "missing average")


@pytest.mark.slow
@pytest.mark.execs
@pytest.mark.parametrize("launcher", [["env", "-i", sys.executable], [sys.executable, "-I"]])
def test_a_process_that_is_not_reached_is_told_why(launcher, tmp_path, monkeypatch, capsys):
    code, found = prove(tmp_path, monkeypatch, capsys, source="import torch", launcher=launcher)
    assert code == 3
    assert "PYTHONPATH and MESHWRIGHT_WATCH must reach it" in found["refused"]
    code, found = prove(
        tmp_path, monkeypatch, capsys, source="import torch", launcher=[sys.executable]
    )
    assert code == 3
    assert "it started 1 Python processes with torch" in found["refused"]


@pytest.mark.parametrize(
    "program", [["meshwright", "train", "a.toml"], [sys.executable, "-m", "meshwright", "train"]]
)
def test_a_run_of_ours_is_refused_for_the_proof_that_it_has(program, tmp_path, capsys):
    assert main(["prove", "--folder", str(tmp_path / "steps"), "--", *program]) == 2
    assert "meshwright prove CONFIG.toml" in capsys.readouterr().err


def test_a_command_that_trains_nothing_has_no_verdict(tmp_path, capsys):
    words = ["--folder", str(tmp_path / "steps"), "--", sys.executable, "-c", "print('hello')"]
    assert main(["prove", *words]) == 3
    assert "no verdict" in capsys.readouterr().out


def test_a_folder_of_other_files_is_not_emptied(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("all of it")
    assert main(["prove", "--folder", str(tmp_path), "--", sys.executable, "-c", ""]) == 2
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize("words", [["--matrix"], ["run.toml"], ["--random", "2"]])
def test_a_command_goes_with_few_arguments(words, capsys):
    assert main(["prove", *words, "--", "torchrun", "train.py"]) == 2
    assert "--steps, --folder, --smallest, --case and --json alone" in capsys.readouterr().err


@ranks(2)
def test_alarms_see_replicas_that_differ_without_a_reference(world):
    for is_wrong in (False, True):
        model, data_ranks, data_rank = build("ddp")
        model.require_backward_grad_sync = not is_wrong
        alarms = ReplicaAlarms(model, say=lambda line: None)
        alarms.start()
        train(model, data_ranks, data_rank)
        alarms.stop()
        assert bool(alarms.alarms) == is_wrong, alarms.alarms
        assert not is_wrong or "differs between ranks" in alarms.alarms[0]


@ranks(2)
def test_alarms_see_a_partial_gradient_under_tp_and_a_parameter_without_one(world):
    model, data_ranks, data_rank = build("tp", head_norms=None)

    def before_step(model):
        model.head.weight.grad = None

    alarms = ReplicaAlarms(model, say=lambda line: None)
    alarms.start()
    train(model, data_ranks, data_rank, clip=None, before_step=before_step)
    alarms.stop()
    assert any("q_norm.weight" in alarm and "differs" in alarm for alarm in alarms.alarms)
    assert any("head.weight has no gradient" in alarm for alarm in alarms.alarms)


@ranks(2)
def test_alarms_are_silent_on_sharded_models(world):
    model, data_ranks, data_rank = build("fsdp2")
    alarms = ReplicaAlarms(model, say=lambda line: None)
    alarms.start()
    train(model, data_ranks, data_rank)
    alarms.stop()
    assert alarms.alarms == []
