"""Export to Hugging Face folders and import from them: nothing is lost, nothing wrong appears."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_folders import (
    assert_same,
    each_model,
    export,
    hf_folder,
    model_of,
    nothing_but,
    stored,
    write_run,
)
from meshwright.checkpoint import hf_check, hf_exchange
from meshwright.checkpoint.commit import step_name
from meshwright.checkpoint.weights import load_model, weights_from
from meshwright.cli import main
from meshwright.data import open_data, train_bpe
from meshwright.data.hf_tokenizer import hf_tokenizer
from meshwright.data.tokenizers import BYTES_EOS
from meshwright.errors import ConfigError
from meshwright.models.hf import load_hf, save_hf
from meshwright.runtime.session import train
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.stored import find_step, stored_spec
from runs import clean_environ

GOLDEN = Path(__file__).parents[2].parent / "shared" / "data" / "golden"


RANKS = {
    "tp2 x shard2": [
        *("layout.tp=2", "layout.sp=true", "layout.dp_shard=2", "layout.dp_replicate=1"),
        "layout.zero=3",
    ],
    "pp2": ["layout.pp=2", "layout.microbatch=1", "layout.dp_replicate=1"],
    "ep2 x shard2": [
        *("model.family=qwen3_moe", "model.experts=6", "model.top_k=3", "model.expert_ffn_dim=48"),
        *("layout.ep=2", "layout.dp_shard=2", "layout.dp_replicate=1", "layout.zero=2"),
    ],
    "ep2 x cp2": [
        *("model.family=gpt_oss", "model.experts=4", "model.top_k=2", "layout.ep=2", "layout.cp=2"),
        "layout.dp_replicate=1",
    ],
    "ep2 x tp2": [
        *("model.family=mixtral", "model.experts=4", "model.top_k=2", "layout.ep=2", "layout.tp=2"),
        "layout.dp_replicate=2",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("words", RANKS.values(), ids=RANKS)
def test_a_run_on_several_ranks_is_exported(words, config, tmp_path):
    """transformers reads what the ranks saved, and has the loss with which the last step began."""
    transformers = pytest.importorskip("transformers")
    asked = config(
        *("model.n_kv_heads=2", "train.steps=3", "checkpoint.every=1", "optimizer.lr=0.02", *words)
    )
    run = train(asked, clean_environ())
    step = run.folder / "checkpoints" / step_name(2)
    assert export(step, tmp_path / "hf", "--tokenizer", "bytes") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    data = open_data(asked.data, tmp_path / "cache", asked.model.vocab_size)
    rows = data.sampler("train", asked.train.seq_len, asked.train.batch).rows(2)
    inputs, targets = (torch.from_numpy(one) for one in (rows.inputs, rows.targets))
    with torch.no_grad():
        logits = theirs(inputs).logits
        torch.testing.assert_close(logits, load_model(step)(inputs), atol=1e-5, rtol=0)
    losses = [event["loss"] for event in run.events("step")]
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert found == pytest.approx(losses[2], abs=1e-5)
    assert abs(losses[2] - losses[0]) > 1e-3


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


@pytest.mark.often(4)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@each_model
def test_a_round_trip_is_bitwise(kind, dtype, tmp_path):
    model = model_of(kind).to(hf_exchange.DTYPES[dtype])
    save_hf(model, tmp_path / "a")
    assert main(["checkpoint", "import-hf", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert load_model(tmp_path / "b").spec == load_hf(tmp_path / "a").spec
    words = ["--tokenizer", "none", "--dtype", dtype]
    assert export(tmp_path / "b", tmp_path / "c", *words) == 0
    assert_same(stored(tmp_path / "c"), stored(tmp_path / "a"))
    ours, theirs = (json.loads((tmp_path / n / "config.json").read_text()) for n in "ca")
    assert ours == theirs
    assert nothing_but(tmp_path, "a", "b", "c")


@each_model
def test_transformers_gives_the_same_logits(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = model_of(kind)
    save_hf(model, tmp_path / "a")
    assert export(tmp_path / "a", tmp_path / "b", "--tokenizer", "bytes") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    ids = torch.randint(0, 320, (2, 50), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), atol=1e-5, rtol=0)
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id == BYTES_EOS


def test_the_export_of_a_run(run, tmp_path, capsys):
    assert export(run, tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["source"].endswith("step-00000000")
    assert found["parameters"] == sum(p.numel() for p in model_of().parameters())
    assert (found["dtype"], found["tokenizer"]) == ("fp32", "bytes")
    made = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert set(found["files"]) == {*made, "model.safetensors"}
    assert nothing_but(tmp_path / "out", *found["files"])
    assert found["bytes"] == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())
    exact = [check for check in found["checks"] if check["tolerance"] in (0, None)]
    assert len(exact) >= 3
    assert all(check["passed"] and check["observed"] == check["expected"] for check in exact)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0
    assert_same(
        dict(load_model(tmp_path / "out").named_parameters()),
        dict(load_model(run).named_parameters()),
    )


def test_bf16_is_rounded_and_says_how_far(run, tmp_path, capsys):
    assert export(run, tmp_path / "out", "--dtype", "bf16", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    claim = "loaded here are the model's, with weights in bf16"
    logits = next(check for check in found["checks"] if claim in check["claim"])
    assert logits["observed"] == logits["tolerance"] == 0
    assert 1e-4 < found["rounding"] < 0.1
    parameters = load_model(run).state_dict()
    for name, tensor in load_hf(tmp_path / "out").state_dict().items():
        assert torch.equal(tensor, parameters[name].bfloat16())


def test_shards_are_at_most_as_large_as_asked(run, tmp_path):
    assert export(run, tmp_path / "out", "--max-shard-size", "20KB") == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    tensors = stored(tmp_path / "out")
    for path in files:
        held = load_file(path)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= 20_000
        assert all(index["weight_map"][name] == path.name for name in held)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    whole = tmp_path / "whole"
    assert export(run, whole) == 0
    assert_same(tensors, stored(whole))


@pytest.mark.slow
def test_the_command_loads_torch_only_to_act():
    code = "import sys, meshwright.cli.checkpoint\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_empty_folder_is_filled(run, tmp_path):
    (tmp_path / "out").mkdir()
    assert export(run, tmp_path / "out") == 0
    assert (tmp_path / "out" / "config.json").is_file()


def test_what_is_there_is_left_alone(run, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for words in (["export-hf", run], ["import-hf", run]):
        assert main(["checkpoint", *map(str, words), str(out)]) == 2
        assert f"{out} is not empty, it must be new or empty; nearest legal: {out}-2" in (
            capsys.readouterr().err
        )
    assert export(run, out / "notes.txt") == 2
    assert "is a file" in capsys.readouterr().err
    assert nothing_but(out, "notes.txt")
    assert (out / "notes.txt").read_text() == "mine"
    assert nothing_but(tmp_path, "run", "out")


def refused(words, capsys, message):
    assert main(["checkpoint", *map(str, words)]) == 2
    assert message in capsys.readouterr().err


def test_refusals_before_anything_is_written(run, tmp_path, capsys):
    out, empty = tmp_path / "out", tmp_path / "empty"
    empty.mkdir()
    (empty / "plan.json").write_text((run / "plan.json").read_text())
    refused(["export-hf", empty, out], capsys, "neither a run with a checkpoint")
    refused(["export-hf", tmp_path / "nowhere", out], capsys, "nowhere is not a folder")
    refused(["import-hf", empty, out], capsys, "config.json is missing")
    refused(["export-hf", run, out, "--tokenizer", "gone.json"], capsys, "no tokenizer at gone")
    file = train_bpe([Path(json.__file__).read_text()], 400, tmp_path / "bpe")
    refused(["export-hf", run, out, "--tokenizer", file], capsys, "vocab_size is 320")
    (run / "plan.json").unlink()
    refused(["export-hf", run, out], capsys, "give --tokenizer")
    for words in (["--max-shard-size", "0"], ["--max-shard-size", "big"], ["--dtype", "fp8"]):
        with pytest.raises(SystemExit, match="2"):
            export(run, out, *words)
    assert nothing_but(tmp_path, "run", "empty", "bpe")


def change_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] *= 1 + 2**-20
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(**keys):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | keys))

    return change


def cut_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


CORRUPTIONS = {
    "a bit of a weight": (change_weights, "tensors are the model's"),
    "an epsilon": (change_config(rms_norm_eps=2e-5), "logits of the folder loaded here"),
    "rotary spellings that disagree": (change_config(rope_theta=1e4), "can be loaded here"),
    "the number of layers": (change_config(num_hidden_layers=1), "can be loaded here"),
    "a truncated file": (cut_file, "can be loaded here"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_corrupt_export_never_appears(kind, run, tmp_path, monkeypatch, capsys):
    corrupt, claim = CORRUPTIONS[kind]
    write = hf_exchange.write_hf

    def write_wrongly(spec, state, folder, **words):
        write(spec, state, folder, **words)
        corrupt(folder)

    monkeypatch.setattr(hf_exchange, "write_hf", write_wrongly)
    assert export(run, tmp_path / "out", "--json") == 1
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert not found["passed"]
    assert any(claim in check["claim"] for check in found["checks"] if not check["passed"])
    assert "was not written: a check failed" in shown.err
    assert nothing_but(tmp_path, "run")


def test_a_wrong_tokenizer_never_appears(run, tmp_path, monkeypatch, capsys):
    def swapped(*args):
        files = hf_tokenizer(*args)
        content = json.loads(files.files["tokenizer.json"])
        vocab = content["model"]["vocab"]
        vocab["e"], vocab["t"] = vocab["t"], vocab["e"]
        files.files["tokenizer.json"] = json.dumps(content).encode()
        return files

    monkeypatch.setattr(hf_exchange, "hf_tokenizer", swapped)
    assert export(run, tmp_path / "out") == 1
    assert "FAILED  ids by the tokenizer of the folder" in capsys.readouterr().out
    assert nothing_but(tmp_path, "run")


def test_what_only_transformers_reads_otherwise_never_appears(run, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    theirs = hf_check._their_logits
    monkeypatch.setattr(hf_check, "_their_logits", lambda folder, ids: theirs(folder, ids) * 1.001)
    assert export(run, tmp_path / "out") == 1
    assert "FAILED  logits of transformers" in capsys.readouterr().out
    assert main(["checkpoint", "import-hf", str(hf_folder(tmp_path)), str(tmp_path / "out")]) == 1
    assert nothing_but(tmp_path, "run", "hf")


def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch, capsys):
    def full(spec, state, folder, **words):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_exchange, "write_hf", full)
    assert export(run, tmp_path / "out") == 2
    assert "out was not written: No space left on device" in capsys.readouterr().err
    assert nothing_but(tmp_path, "run")


def test_without_transformers_it_says_so(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert export(run, tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert "transformers cannot be imported" in found["not_checked"]
    assert len(found["checks"]) == 3
    assert export(run, tmp_path / "again") == 0
    assert "not checked by transformers: " in capsys.readouterr().out


def test_a_version_that_misreads_a_folder_is_not_asked(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    save_hf(model_of(), tmp_path / "a")
    file = tmp_path / "a" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in config.items() if k != "rope_theta"}))
    for version, said in (("4.57.6", "does not read the rope_parameters"), ("4.9.0", "older than")):
        monkeypatch.setattr(transformers, "__version__", version)
        words = ["import-hf", str(tmp_path / "a"), str(tmp_path / version), "--json"]
        assert main(["checkpoint", *words]) == 0
        assert said in json.loads(capsys.readouterr().out)["not_checked"]


@each_model
def test_training_starts_from_an_imported_folder(kind, tmp_path):
    model = model_of(kind)
    save_hf(model, tmp_path / "hf")
    assert main(["checkpoint", "import-hf", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    specs = []
    for name in ("hf", "ours"):
        config = load_config(None, [f"model.init_from={tmp_path / name}"])
        specs.append(config.model.model_copy(update={"init_from": None}))
    assert specs[0] == specs[1] == model.spec.model_copy(update={"preset": None})
    assert config.origins["model.dim"] == str(tmp_path / "ours" / "step-00000000" / "model.json")
    source = weights_from(tmp_path / "ours", config.model)
    weight = model.layers["1"].attn.k.weight
    rows = ((4, 8), (0, 32))
    assert torch.equal(source("layers.1.attn.k.weight", tuple(weight.shape), rows), weight[4:8])


def test_the_newest_step_is_meant(tmp_path):
    for at, dim in ((9, 32), (99999999, 16), (100000000, 8)):
        step = tmp_path / "run" / "checkpoints" / f"step-{at:08}"
        step.mkdir(parents=True)
        spec = model_spec(dim=dim, n_heads=2, n_kv_heads=1)
        (step / "model.json").write_text(spec.model_dump_json())
    (tmp_path / "run" / "checkpoints" / ".tmp-step-200000000-ab").mkdir()
    assert find_step(tmp_path / "run").name == "step-100000000"
    assert stored_spec(tmp_path / "run")[0].dim == 8
    assert stored_spec(tmp_path / "run" / "checkpoints" / "step-00000009")[0].dim == 32
    (step / "model.json").write_text('{"dim": 8}')
    with pytest.raises(ConfigError, match=r"model\.json describes no valid model"):
        load_config(None, [f"model.init_from={tmp_path / 'run'}"])


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden folders in {GOLDEN}")
@pytest.mark.parametrize("name", ["llama_gqa_theta500k", "llama_tied_mha", "neox_parallel_rot25"])
def test_golden_folders_come_through(name, tmp_path):
    golden = GOLDEN / name
    assert main(["checkpoint", "import-hf", str(golden), str(tmp_path / "ours")]) == 0
    assert export(tmp_path / "ours", tmp_path / "out", "--tokenizer", "none") == 0
    assert_same(stored(tmp_path / "out"), stored(golden))
    told = np.load(golden / "golden.npz")
    with torch.no_grad():
        logits = load_model(tmp_path / "out")(torch.from_numpy(told["input_ids"]))
    np.testing.assert_allclose(logits.numpy(), told["logits"], atol=1e-4, rtol=0)
