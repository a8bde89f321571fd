"""Other systems compared with one process: where they are right, and faults that were public."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import other_trainers
from benchmarks.other_trainers import page, read, run_cases
from benchmarks.other_trainers_cases import case, cases

from meshwright.cli import main
from meshwright.prove.trainers.standalone import EXIT_WRONG, SCRIPT, standalone_script

pytest.importorskip("accelerate", reason="transformers loads sharded models with accelerate")

DIVIDES = {"dp": 2, "calculate_per_token_loss": True}


def found(tmp_path, *some):
    run_cases(some, some[0]["ranks"], tmp_path / "rows.jsonl")
    rows = read(tmp_path / "rows.jsonl")
    assert len(rows) == len(some)
    assert not [row for row in rows if "crashed" in row], rows
    return rows


def test_right_layouts_of_transformers_agree(tmp_path):
    rows = found(
        tmp_path,
        case("transformers", "llama", {"tp_size": 2}),
        case("transformers", "llama, tied", {"fsdp_size": 2}),
        case("transformers", "qwen3", {"tp_size": 2}, microbatches=1),
        case("transformers", "mixtral", {"tp_size": 2}),
        case("transformers", "mixtral", {"fsdp_size": 2, "ep_size": 2}),
    )
    for row in rows:
        assert row["verdict"]["passed"], row
    assert page(rows).count("| right (") == len(rows)


def test_each_case_has_a_line_of_its_own():
    """Else, a line could be another case's: what tells two apart is in the cells."""
    keys = [json.dumps({**one, "ranks": None}, sort_keys=True) for one in cases()]
    assert len(set(keys)) == len(keys)


def test_a_page_keeps_the_lines_that_are_not_run_again():
    """Whatever version wrote them, in the order of the cases; the table has no system twice."""
    passed = {"passed": True, "refused": None, "faults": []}
    new = {**case("accelerate", "llama", {"ddp": 2}, 1), "verdict": {**passed, "compared": 7}}
    kept = "| deepspeed 0.1 | llama | stage=1 | 2 | right (5 numbers) |"
    old = "| accelerate 0.1 | llama | ddp=2 | 1 | raises: KeyError |"
    gone = "| accelerate 0.1 | llama | ddp=3 | 1 | right (5 numbers) |"
    lines = page([new], "\n".join(["# Other systems", gone, old, kept])).splitlines()
    assert lines[-2] == kept
    assert lines[-1].startswith("| accelerate ")
    assert lines[-1].endswith("| right (7 numbers) |")
    assert lines[-3].startswith("|---")


def test_a_norm_of_heads_is_summed_again_under_tp_with_two_microbatches(tmp_path):
    (row,) = found(tmp_path, case("transformers", "qwen3", {"tp_size": 2}))
    (fault,) = row["verdict"]["faults"]
    assert (fault["kind"], fault["axes"]) == ("summed again", ["tp"])
    assert all("q_norm" in name or "k_norm" in name for name in fault["tensors"])
    assert "2 g0 + g1" in fault["sentence"]


def test_public_faults_that_are_put_back_are_named(tmp_path):
    shared = {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"}
    faults = {
        "transformers#48205": (case("transformers", "mixtral", shared, 1), "missing sum"),
        "pytorch#160285": (
            case("transformers", "mixtral", {"fsdp_size": 2, "ep_size": 2}, 1),
            "scaled",
        ),
        "torchtitan#2387": (case("transformers", "mixtral", {"tp_size": 2}, 1), "missing sum"),
    }
    some = [{**one, "fault": name} for name, (one, _) in faults.items()]
    for row, (_, kind) in zip(found(tmp_path, *some), faults.values(), strict=True):
        fault = row["verdict"]["faults"][0]
        assert fault["kind"] == kind, row
        is_router = "gate.weight" in fault["tensors"][0]
        assert is_router if kind == "missing sum" else "experts" in fault["tensors"][0]


@pytest.mark.parametrize(("family", "code"), [("llama", 0), ("qwen3", 1)])
def test_the_example_of_the_trainer_with_tp(family, code):
    example = Path(__file__).parents[2] / "examples" / "hf_trainer.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = [*launcher, "--standalone", str(example), family, "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == code, done.stdout + done.stderr
    assert ("PASS" if not code else "summed over tp again at each microbatch") in done.stdout


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_example_of_megatron(is_wrong):
    pytest.importorskip("megatron.core", reason="a group of extras installs it")
    example = Path(__file__).parents[2] / "examples" / "megatron_loop.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = [*launcher, "--standalone", str(example), *(["--forget"] if is_wrong else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == is_wrong, done.stdout + done.stderr
    assert ("a sum over tp is missing" if is_wrong else "PASS 2 ranks (tp = 2)") in done.stdout


def test_deepspeed_agrees(tmp_path):
    pytest.importorskip("deepspeed", reason="a group of extras installs it")
    for row in found(tmp_path, *(case("deepspeed", "llama", {"stage": n}) for n in range(4))):
        assert row["verdict"]["passed"], row


def test_accelerate_agrees(tmp_path):
    """Its FSDP2 is really there: the axis that shards has a name."""
    sharded = {"fsdp_version": 2, "dp_shard_size": 2, "reshard_after_forward": True}
    rows = found(tmp_path, *(case("accelerate", "llama", x) for x in ({"ddp": 2}, sharded)))
    for row, axis in zip(rows, ("dp", "dp_shard_cp"), strict=True):
        assert row["verdict"]["passed"], row
        assert axis in row["verdict"]["axes"], row


def test_a_script_that_stands_by_itself_shows_a_wrong_gradient(tmp_path):
    """Of a right layout, the same script ends with 0: it is not the script that is wrong."""
    wrong, right = found(
        tmp_path,
        case("transformers", "qwen3", {"tp_size": 2}),
        case("transformers", "llama", {"tp_size": 2}),
    )
    (fault,) = wrong["verdict"]["faults"]
    name = "model.layers.0.input_layernorm.weight"
    accused = {**right["verdict"], "faults": [{**fault, "tensors": [name]}]}
    for verdict, code in ((wrong["verdict"], EXIT_WRONG), (accused, 0)):
        script = tmp_path / SCRIPT
        script.write_text(standalone_script(verdict))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        words = [*launcher, "--standalone", str(script)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (f"exitcode  : {code} " in done.stderr) == (code > 0), done.stdout + done.stderr
        assert (done.returncode == 0) == (code == 0)
        assert "of its size off" in done.stdout


def test_torchtitan_is_right_but_for_the_mean_of_its_ddp(tmp_path):
    """Its loop divides by the global number of targets, and its DDP averages besides."""
    pytest.importorskip("torchtitan", reason="a group of extras installs it")
    layouts = ({"dp_shard": 2}, {"tp": 2}, {"dp_replicate": 2})
    *right, doubly_divided = found(tmp_path, *(case("torchtitan", "llama3", x) for x in layouts))
    for row, axis in zip(right, ("fsdp", "tp"), strict=True):
        assert row["verdict"]["passed"], row
        assert axis in row["verdict"]["axes"], row
    (fault,) = doubly_divided["verdict"]["faults"]
    assert (fault["kind"], round(fault["ratio"], 4)) == ("scaled", 0.5)


def test_megatron_agrees(tmp_path):
    pytest.importorskip("megatron.core", reason="a group of extras installs it")
    rows = found(
        tmp_path,
        case("megatron-core", "gpt", {"dp": 2}),
        case("megatron-core", "gpt", {"tp": 2}),
        case("megatron-core", "gpt", DIVIDES),
    )
    for row, axis in zip(rows, ("dp", "tp", "dp"), strict=True):
        assert row["verdict"]["passed"], row
        assert axis in row["verdict"]["axes"], row


def test_a_number_of_tokens_that_megatron_does_not_sum_is_named(tmp_path):
    """Each rank's gradient is a multiple of the right one: no sum of gradients is missing."""
    pytest.importorskip("megatron.core", reason="a group of extras installs it")
    seeded = {"seeded": "megatron: own number of tokens"}
    (row,) = found(tmp_path, {**case("megatron-core", "gpt", DIVIDES), **seeded})
    (fault,) = row["verdict"]["faults"]
    assert fault["kind"] == "local token count"
    assert "each data rank's own number of targets" in fault["sentence"]


def test_engines_of_torch_agree(tmp_path):
    rows = found(tmp_path, *(case("torch", "llama", x) for x in ({"fsdp1": 2}, {"tp": 2})))
    for row, axis in zip(rows, ("shard", "tp"), strict=True):
        assert row["verdict"]["passed"], row
        assert axis in row["verdict"]["axes"], row


def test_a_case_that_hangs_is_ended_and_the_next_one_runs(tmp_path, monkeypatch):
    """No rank is left behind, and the cases after it are not lost."""
    worker = tmp_path / "worker.py"
    worker.write_text(HANGS)
    monkeypatch.setattr(other_trainers, "WORKER", worker)
    monkeypatch.setattr(other_trainers, "TIMEOUT_S", 15)
    run_cases([{"n": 1}, {"n": 2}, {"n": 3}], 1, tmp_path / "rows.jsonl")
    rows = read(tmp_path / "rows.jsonl")
    assert [row["n"] for row in rows] == [1, 2, 3]
    assert [row.get("crashed") for row in rows] == [None, "the processes ended, or hung", None]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "hung").read_text()), 0)


def test_meshwright_agrees(tmp_path):
    rows = found(
        tmp_path,
        case("meshwright", "qwen3", {"tp": 2}),
        case("meshwright", "llama", {"dp_shard": 2, "zero": 3}),
        case("meshwright", "llama", {"dp_replicate": 2}),
    )
    for row in rows:
        assert row["verdict"]["passed"], row


HANGS = """\
import json
import os
import sys
import time
from pathlib import Path

for case in json.loads(Path(sys.argv[1]).read_text()):
    if case["n"] == 2:
        Path(sys.argv[2]).with_name("hung").write_text(str(os.getpid()))
        time.sleep(1000)
    with open(sys.argv[2], "a") as file:
        file.write(json.dumps(case) + "\\n")
"""
LAUNCHED = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trainer_loops

dist.init_process_group("gloo")
model = DistributedDataParallel(trainer_loops.Tiny())
trainer_loops.train(model, dist.get_world_size(), dist.get_rank(), steps=1000)
"""
LAUNCHERS = {
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"],
    "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29631"],
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_script_is_proven_under_other_launchers(name, tmp_path, monkeypatch, capsys):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    command = [sys.executable, "-m", *LAUNCHERS[name], str(script)]
    code = main(["prove", "--json", "--folder", str(tmp_path / "steps"), "--", *command])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["passed"], found["world"]) == (0, True, 2), found
