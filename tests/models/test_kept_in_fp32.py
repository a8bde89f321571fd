"""What half precision must not round: the corrections of routers, by which experts are picked."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_folders import export
from meshwright.checkpoint.weights import load_model
from meshwright.cli import eval as evaluation
from meshwright.models import build_model, init_model
from meshwright.models.hf import WEIGHTS, load_hf, save_hf
from meshwright.models.hf_names import hf_name
from meshwright.parallel.data_parallel.sharded import narrow_weights
from meshwright.spec.families import FAMILIES
from meshwright.spec.parts import buffers, kept_in_fp32
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec

SPEC = model_spec(
    family="deepseek_v3",
    vocab_size=72,
    dim=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=4,
    ffn_dim=48,
    experts=8,
    top_k=2,
    expert_groups=1,
    top_groups=1,
    dense_layers=1,
    expert_ffn_dim=16,
    shared_ffn_dim=16,
    q_lora_rank=0,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)


@pytest.fixture
def model():
    made = init_model(build_model(SPEC, "cpu"), SPEC, seed=0)
    generator = torch.Generator().manual_seed(1)
    for buffer in made.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=generator) / 10)
    return made


def corrections(model):
    return {name: one.clone() for name, one in model.named_buffers()}


def assert_kept(model, wanted):
    assert len(wanted) == 2
    for name, one in model.named_buffers():
        assert one.dtype == torch.float32
        assert torch.equal(one, wanted[name]), name


CONVERSIONS = {
    "to": lambda model: model.to(torch.bfloat16),
    "to a device": lambda model: model.to("cpu", torch.bfloat16),
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "like": lambda model: model.to(torch.zeros(1, dtype=torch.float16)),
    "a copy": lambda model: copy.deepcopy(model).bfloat16(),
    "there and back": lambda model: model.bfloat16().float(),
    "a stage": lambda model: model.keep([1, 2], first=False, last=True).bfloat16(),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_leaves_them(name, model):
    wanted, before = corrections(model), model.norm.weight.dtype
    made = CONVERSIONS[name](model)
    assert_kept(made, wanted)
    assert before == torch.float32
    assert (made.norm.weight.dtype == torch.float32) == (name == "there and back")


def test_a_move_or_a_wider_dtype_is_followed(model):
    wanted = corrections(model)
    for name, one in copy.deepcopy(model).double().named_buffers():
        assert torch.equal(one, wanted[name].double())
    assert {one.device.type for one in model.bfloat16().to("meta").buffers()} == {"meta"}


def test_routing_in_bf16_is_by_exact_corrections(model, tmp_path, monkeypatch):
    """`eval --precision bf16` converts the whole model."""
    save_hf(model, tmp_path / "hf")
    assert_kept(evaluation._load(tmp_path / "hf", "cpu", "bf16"), corrections(model))


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_files", [torch.float32, torch.bfloat16])
def test_a_folder_is_loaded_with_them_in_fp32(dtype, of_files, model, tmp_path):
    save_hf(model, tmp_path / "hf")
    stored = {k: one.to(of_files) for k, one in load_file(tmp_path / "hf" / WEIGHTS).items()}
    save_file(stored, tmp_path / "hf" / WEIGHTS, metadata={"format": "pt"})
    wanted = {name: one.to(of_files).float() for name, one in corrections(model).items()}
    found = load_hf(tmp_path / "hf", dtype)
    assert_kept(found, wanted)
    assert found.norm.weight.dtype == (dtype or of_files)


def test_an_export_in_bf16_has_them_and_comes_back(model, tmp_path):
    save_hf(model, tmp_path / "hf")
    assert export(tmp_path / "hf", tmp_path / "a", "--dtype", "bf16", "--tokenizer", "none") == 0
    assert export(tmp_path / "a", tmp_path / "b", "--dtype", "bf16", "--tokenizer", "none") == 0
    wanted = corrections(model)
    for folder in (tmp_path / "a", tmp_path / "b"):
        stored = load_file(folder / WEIGHTS)
        assert {one.dtype for one in stored.values()} == {torch.float32, torch.bfloat16}
        for name, one in wanted.items():
            assert torch.equal(stored[hf_name(SPEC.family, name)], one)
        assert_kept(load_model(folder), wanted)


def test_frozen_weights_are_rounded_without_them(model):
    wanted = corrections(model)
    for parameter in model.parameters():
        parameter.requires_grad = False
    narrow_weights(model, TrainSpec(precision="bf16"))
    assert_kept(model, wanted)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_they_are_what_transformers_keeps(family):
    """A parameter among them would also need a compute dtype of its own in training."""
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, FAMILIES[family].architecture)
    kept = set(theirs._keep_in_fp32_modules_strict or ())
    names = {hf_name(family, f"layers.0.{one}") for one in FAMILIES[family].kept_in_fp32}
    assert {name.rpartition(".")[2] for name in names} == kept
    spec = model_spec(preset=next(iter(FAMILIES[family].presets)))
    assert kept_in_fp32(spec) == {part.name for part in buffers(spec) if kept}
