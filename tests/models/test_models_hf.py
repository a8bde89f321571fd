"""Hugging Face folders: the golden ones, and every way in which a folder can be wrong."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from meshwright.errors import CheckpointError, ConfigError
from meshwright.models import build_model, init_model
from meshwright.models.hf import hf_source, load_hf, save_hf
from meshwright.models.hf_names import from_hf, hf_name, hf_tensors, to_hf
from meshwright.program.shards import whole
from meshwright.spec.parts import parts
from meshwright.spec.resolve import model_spec

GOLDEN = Path(__file__).parents[2].parent / "shared" / "data" / "golden"
NAMES = ["llama_gqa_theta500k", "llama_tied_mha", "neox_parallel_rot25"]
BASE = {"vocab_size": 48, "dim": 16, "n_layers": 2, "n_heads": 2, "context": 32}
FAMILIES = {
    "llama": {"n_kv_heads": 1},
    "llama-tied": {"tie_embeddings": True},
    "neox": {"family": "neox", "parallel_residual": True},
    "neox-tied": {"family": "neox", "tie_embeddings": True},
}


@pytest.fixture(params=["config.json", "config.v4.json"])
def style(request):
    return request.param


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden folders in {GOLDEN}")
@pytest.mark.parametrize("name", NAMES)
def test_golden_logits_loss_and_gradients(name, style, tmp_path):
    folder = shutil.copytree(GOLDEN / name, tmp_path / name)
    shutil.copy(GOLDEN / name / style, folder / "config.json")
    stored, told = np.load(folder / "golden.npz"), json.loads((folder / "golden.json").read_text())
    model = load_hf(folder)
    ids = torch.from_numpy(stored["input_ids"]).long()
    logits = model(ids)
    torch.testing.assert_close(logits, torch.from_numpy(stored["logits"]), atol=1e-5, rtol=0)

    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(told["loss"], abs=1e-6)
    loss.backward()
    squares: dict[str, float] = {}
    for ours, parameter in model.named_parameters():
        theirs = hf_name(model.spec.family, ours)
        squares[theirs] = squares.get(theirs, 0.0) + parameter.grad.double().square().sum().item()
    # transformers 5 calls the head of both families lm_head.
    expected = {
        key.replace("/", ".").replace("embed_out.", "lm_head."): norm
        for key, norm in told["grad_norms"].items()
    }
    found = {key.replace("embed_out.", "lm_head."): value**0.5 for key, value in squares.items()}
    assert found.keys() == expected.keys()
    for key, norm in expected.items():
        assert found[key] == pytest.approx(norm, rel=1e-5), key


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden folders in {GOLDEN}")
@pytest.mark.parametrize("name", NAMES)
def test_golden_weights_come_back_bitwise(name, tmp_path):
    save_hf(load_hf(GOLDEN / name), tmp_path)
    before = load_file(GOLDEN / name / "model.safetensors")
    after = load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.fixture(params=sorted(FAMILIES))
def model(request):
    spec = model_spec(**BASE, **FAMILIES[request.param])
    return init_model(build_model(spec, device="cpu"), spec, seed=0)


@pytest.fixture
def folder(model, tmp_path):
    save_hf(model, tmp_path / "hf")
    return tmp_path / "hf"


def edit(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def equal(one, two):
    one, two = dict(one.named_parameters()), dict(two.named_parameters())
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("limit", [5 * 10**9, 5000, 1])
def test_shards_come_back(model, tmp_path, limit):
    save_hf(model, tmp_path, max_shard_bytes=limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    if limit > 5000:
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert {file.name for file in files} == set(index["weight_map"].values())
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
        count = len(hf_tensors(model.spec))
        assert len(files) == count if limit == 1 else 1 < len(files) < count
    assert equal(load_hf(tmp_path), model)


def test_tables_are_inverse(model):
    state = {name: p.detach() for name, p in model.named_parameters()}
    stored = to_hf(model.spec, state)
    assert {item.name: item.shape for item in hf_tensors(model.spec)} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    back = from_hf(model.spec, stored)
    assert list(back) == [part.name for part in parts(model.spec)] or model.spec.family == "neox"
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_dtype(model, folder):
    loaded = load_hf(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in loaded.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.bfloat16())


def test_the_model_outlives_its_file(model, folder):
    loaded = load_hf(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * (folder / "model.safetensors").stat().st_size)
    assert equal(loaded, model)


def test_source_gives_parameters_by_name(model, folder):
    source = hf_source(folder, model.spec)
    for name, parameter in reversed(list(model.named_parameters())):
        shape = tuple(parameter.shape)
        assert torch.equal(source(name, shape, whole(shape)), parameter)
        for cuts in (2, 3):  # of whole heads, and through the midst of them
            for at in range(cuts):
                rows = (shape[0] * at // cuts, shape[0] * (at + 1) // cuts)
                part = source(name, shape, (rows, *whole(shape[1:])))
                assert torch.equal(part, parameter[rows[0] : rows[1]]), (name, rows)
        empty = source(name, shape, ((shape[0], shape[0]), *whole(shape[1:])))
        assert empty.shape == (0, *shape[1:])
    with pytest.raises(CheckpointError, match=r"norm\.weight is \[16\], but \[8\] was asked"):
        source("norm.weight", (8,), ((0, 8),))
    other = model.spec.model_copy(update={"ffn_dim": 8})
    with pytest.raises(CheckpointError, match="but the config gives"):
        hf_source(folder, other)


def first_tensor(model):
    return hf_tensors(model.spec)[3].name


def test_missing_tensor(model, folder):
    name = first_tensor(model)
    edit(folder / "model.safetensors", lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        load_hf(folder)


def test_unexpected_tensor(model, folder):
    edit(folder / "model.safetensors", lambda t: t.update({"model.layers.9.x": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.9\.x, which"):
        load_hf(folder)


def test_wrong_shape_names_both(model, folder):
    name = first_tensor(model)
    shape = hf_tensors(model.spec)[3].shape
    edit(folder / "model.safetensors", lambda t: t.update({name: torch.ones(3, 5)}))
    with pytest.raises(CheckpointError) as caught:
        load_hf(folder)
    assert name in str(caught.value)
    assert "[3, 5]" in str(caught.value)
    assert str(list(shape)) in str(caught.value)


def test_wrong_dtype(model, folder):
    name = first_tensor(model)
    edit(folder / "model.safetensors", lambda t: t.update({name: t[name].to(torch.int32)}))
    with pytest.raises(CheckpointError, match=f"{name} is torch.int32"):
        load_hf(folder)


def test_stored_tables_are_passed_over(model, folder):
    prefix = "model.layers.0.self_attn." if model.spec.family == "llama" else (
        "gpt_neox.layers.0.attention."
    )  # fmt: skip
    extra = {f"{prefix}rotary_emb.inv_freq": torch.ones(4)}
    if model.spec.family == "neox":
        extra |= {f"{prefix}bias": torch.ones(1, 1, 4, 4), f"{prefix}masked_bias": torch.ones(1)}
    edit(folder / "model.safetensors", lambda tensors: tensors.update(extra))
    assert equal(load_hf(folder), model)


def test_a_stored_copy_of_a_tied_head(model, folder):
    names = {"llama": ("lm_head.weight", "model.embed_tokens.weight")}
    head, embed = names.get(model.spec.family, ("embed_out.weight", "gpt_neox.embed_in.weight"))
    if not model.spec.tie_embeddings:  # a head of its own counts
        edit(folder / "model.safetensors", lambda t: t[head].add_(1))
        assert not equal(load_hf(folder), model)
        return
    edit(folder / "model.safetensors", lambda t: t.update({head: t[embed].clone()}))
    assert equal(load_hf(folder), model)
    edit(folder / "model.safetensors", lambda t: t[head].add_(1))
    with pytest.raises(CheckpointError, match=f"{head} differs from {embed}"):
        load_hf(folder)


def test_a_tied_model_stored_under_the_name_of_its_head(model, folder):
    names = {"llama": ("lm_head.weight", "model.embed_tokens.weight")}
    head, embed = names.get(model.spec.family, ("embed_out.weight", "gpt_neox.embed_in.weight"))
    edit(folder / "model.safetensors", lambda t: t.update({head: t.pop(embed)}))
    if model.spec.tie_embeddings:
        assert equal(load_hf(folder), model)
    else:
        with pytest.raises(CheckpointError, match=f"lacks {embed}"):
            load_hf(folder)


def test_neox_head_under_its_new_name(tmp_path):
    spec = model_spec(**BASE, family="neox")
    model = init_model(build_model(spec, device="cpu"), spec, seed=0)
    save_hf(model, tmp_path)
    edit(tmp_path / "model.safetensors", lambda t: t.update({"lm_head.weight": t.pop("embed_out.weight")}))  # fmt: skip # noqa: E501
    assert equal(load_hf(tmp_path), model)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def test_pickles_are_refused_unread(model, folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"is a pickle, .*\.save_pretrained"):
        load_hf(folder)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "..", "x.bin", "", 3,
             "a\\b.safetensors"]
)  # fmt: skip
def test_an_index_cannot_leave_the_folder(model, folder, name):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": dict.fromkeys(to_hf_names(model), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="which is not one of the folder"):
        load_hf(folder)


def to_hf_names(model):
    return [item.name for item in hf_tensors(model.spec)]


def test_a_missing_shard_is_named(model, tmp_path):
    save_hf(model, tmp_path, max_shard_bytes=5000)
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"{lost.name}.* is missing"):
        load_hf(tmp_path)


@pytest.mark.parametrize("name", ["a" * 300 + ".safetensors", "a" * 5000 + ".safetensors"])
def test_an_index_that_names_what_no_system_can_open(model, tmp_path, name):
    save_hf(model, tmp_path, max_shard_bytes=4000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"a{100}, which .* names, is missing") as caught:
        load_hf(tmp_path)
    assert "a" * 101 not in str(caught.value)


def test_a_tensor_in_two_shards_is_refused(model, tmp_path):
    save_hf(model, tmp_path, max_shard_bytes=5000)
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    both = load_file(second) | load_file(first)
    save_file(both, second)
    with pytest.raises(CheckpointError, match="which another shard holds too"):
        load_hf(tmp_path)


DAMAGES = {
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "header too long": lambda data: (2**62).to_bytes(8, "little") + data[8:],
    "not json": lambda data: data[:8] + b"x" * 20 + data[28:],
    "trailing": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_file_is_named(folder, damage):
    path = folder / "model.safetensors"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a sound"):
        load_hf(folder)


def test_folders_that_are_none(model, folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere is not a folder"):
        load_hf(tmp_path / "nowhere")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        load_hf(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a JSON object"):
        load_hf(folder)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match=r"config\.json: model_type = 'bert'"):
        load_hf(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_hf(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        load_hf(folder)


def test_an_export_overwrites_nothing(model, folder):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"already holds config\.json"):
        save_hf(model, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert not list(folder.glob("*.partial"))


def test_a_stage_is_not_exported(model, tmp_path):
    stage = model.keep([1], first=False, last=True)
    with pytest.raises(CheckpointError, match=r"lacks .*layers\.0.*is it one stage only"):
        save_hf(stage, tmp_path)
    assert not list(tmp_path.iterdir())
