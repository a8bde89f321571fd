"""Layers of Gated DeltaNet in layouts: parity with one device, faults that proofs must catch."""

import functools

import pytest
import torch
from safetensors.torch import load_file, save_file

import recurrent_layouts
from meshwright.layout import Layout, broken
from meshwright.models import build_model, init_model
from meshwright.models.delta_net import GatedDeltaNet
from meshwright.models.hf import load_hf, save_hf
from meshwright.prove.case import Case
from meshwright.prove.kept import not_kept
from meshwright.prove.shrink import shrink
from meshwright.spec.model import ModelSpec
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from recurrent_layouts import (
    PASSING,
    PEAKS,
    check_caught,
    check_census,
    check_parity,
    check_peak,
    labelled,
    layers_of,
    run_on,
)
from seeded import without_sums

SIZES = {
    "family": "qwen3_next",
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 72,
    "ffn_dim": 48,
    "experts": 0,
    "norm_eps": 1e-3,
    "layer_pattern": [{"delta": True}, {}],
    "delta_heads": 4,
    "delta_key_heads": 2,
    "delta_key_dim": 5,
    "delta_value_dim": 6,
    "delta_kernel": 3,
}
MODELS = {
    "dense": SIZES,
    # More heads of values for one of keys, a longer convolution, most layers recurrent.
    "wide": {
        **SIZES,
        "layer_pattern": [{"delta": True}, {"delta": True}, {"delta": True}, {}],
        "delta_heads": 12,
        "delta_key_heads": 4,
        "delta_value_dim": 3,
        "delta_kernel": 4,
        "tie_embeddings": True,
        "attention_bias": True,
    },
    "wide4": {**SIZES, "n_kv_heads": 4, "delta_heads": 8, "delta_kernel": 6},
    "experts": {
        **SIZES,
        "experts": 4,
        "top_k": 2,
        "expert_ffn_dim": 24,
        "shared_ffn_dim": 20,
    },
}


def case_of(label, model="dense", **asked):
    return recurrent_layouts.case_of(MODELS[model], label, **asked)


CASES = [
    case_of("mb4", "wide"),
    case_of("mb2 recompute-selective", "experts", packed=True),
    case_of("mb2 recompute-full", "wide", packed=True, seq_len=130),
    case_of("dp2 mb2", packed=True),
    case_of("tp2 mb2", "wide"),
    case_of("tp2 mb2", packed=True, seq_len=70),
    case_of("tp2 sp mb2 recompute-full", "experts", packed=True),
    case_of("tp2 sp mb2", "wide", precision="bf16"),
    case_of("pp2 1f1b mb2", "wide", packed=True),
    case_of("pp2 interleaved_1f1b v2 mb2", "experts"),
    case_of("shard2 zero1 ep2 mb2", "experts"),
    case_of("shard2 zero2 mb2", "wide", precision="bf16"),
    case_of("shard2 zero3 ep2 mb2 recompute-full", "experts", packed=True),
    case_of("shard2 zero3 mb2 offload-params", "wide"),
    case_of("shard2 zero3 mb2", packed=True, fsdp2=True),
    case_of("mb2 offload-activations", "wide", packed=True),
    case_of("tp2 dp2 ep2 mb2", "experts"),
    case_of("pp2 zbv v2 mb1", "experts", packed=True),
    case_of("mb2", "wide", packed=True, compile=True),
    case_of("cp2-ring mb2", "wide", packed=True),
    case_of("cp2-ulysses mb2", "experts", packed=True, seq_len=70),
    case_of("cp4-ring mb2", "wide4", packed=True),
    case_of("cp4-ulysses mb2 recompute-selective", "wide4"),
    case_of("cp2-ring tp2 sp mb2 recompute-full", "wide", packed=True),
    case_of("cp2-ring shard2 zero3 mb2 recompute-selective", packed=True),
    case_of("cp2-ulysses pp2 1f1b mb2", "wide", packed=True),
    case_of("cp2-ring pp2 zbv v2 mb1", "experts"),
    case_of("cp2-ring shard2 zero2 ep2 mb2", "experts", packed=True),
    case_of("cp2-ring mb2", "wide", precision="bf16"),
    case_of("cp2-ring zero3 mb2", packed=True, fsdp2=True),
    case_of("cp2-ulysses mb2 offload-activations", "wide", packed=True),
    case_of("cp2-ring mb2", "wide", packed=True, compile=True),
]


@pytest.mark.often(1)
@pytest.mark.parametrize("case", labelled(CASES))
def test_a_layout_is_one_device(case):
    check_parity(case)


CENSUS = [
    case_of("mb2", "wide", seq_len=70),
    case_of("tp2 sp mb2", "experts"),
    case_of("shard2 zero3 mb2 recompute-full", "wide"),
    case_of("pp2 1f1b mb2"),
    case_of("cp2-ring mb2", "wide", seq_len=140),
    case_of("cp2-ulysses mb2 recompute-selective", packed=True),
    case_of("cp4-ring mb2 recompute-full", "experts"),
    case_of("cp4-ulysses mb2 recompute-selective", "wide4"),
    case_of("cp2-ring tp2 sp mb2", "wide"),
]


@pytest.mark.often(1)
@pytest.mark.parametrize("case", labelled(CENSUS))
def test_a_program_is_what_its_ranks_do(case):
    check_census(case)


# Widths at which activations and states weigh about the same.
LARGE = {
    **SIZES,
    "dim": 256,
    "head_dim": 64,
    "vocab_size": 512,
    "ffn_dim": 512,
    "delta_heads": 8,
    "delta_key_heads": 4,
    "delta_key_dim": 32,
    "delta_value_dim": 32,
    "delta_kernel": 4,
    "layer_pattern": [{"delta": True}, {"delta": True}, {"delta": True}, {}],
}


@pytest.mark.slow
@pytest.mark.parametrize(("label", "precision"), PEAKS)
def test_the_peak_is_predicted(label, precision):
    check_peak(LARGE, label, precision)


def layers(parallel):
    """The recurrent layers of a rank."""
    return layers_of(parallel, GatedDeltaNet)


def norm_of_own_heads(parallel):
    """The gated norm has the gradient of a rank's own heads alone."""
    without_sums(parallel, ".gated_norm.weight")


def documents_run_on(parallel):
    """States and convolutions pass the borders of documents."""
    run_on(layers(parallel))


def wrong_heads(parallel):
    """A rank's decays are those of the other rank's heads."""
    for layer in layers(parallel):
        layer.local = lambda parameter, local=layer.local: local(parameter).flip(0)


FAULTS = [
    (norm_of_own_heads, case_of("tp2 mb2")),
    (documents_run_on, case_of("mb2", packed=True)),
    (wrong_heads, case_of("tp2 mb2", "wide")),
]


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("fault", "case"), [pytest.param(*one, id=one[0].__name__) for one in FAULTS]
)
def test_faults_are_caught(fault, case):
    check_caught(fault, case)


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("fault", "label", "packed"),
    [pytest.param(*faulty, id=faulty[0].__name__) for faulty in PASSING],
)
def test_faults_of_passing_are_caught(fault, label, packed):
    check_caught(functools.partial(passed_wrongly, fault), case_of(label, packed=packed))


def passed_wrongly(fault, parallel):
    fault(layers(parallel))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_published_model_is_proven_by_a_small_one_with_all_it_has(tp):
    model = model_spec(preset="qwen3-next-80b-a3b", n_kv_heads=4)
    train = TrainSpec(batch=8, seq_len=64)
    layout = Layout.parse(f"tp{tp} mb2" if tp > 1 else "mb2")
    for small in shrink(model, train, layout):
        assert small.model.has_delta
        assert small.model.delta_key_heads % small.layout.tp == 0
        lost = not_kept(Case(model, train, layout), small)
        assert [name for name in lost if "recurrence" in name] == []


def test_layouts_that_cut_states_or_heads_are_refused():
    model, train = model_spec(**SIZES), TrainSpec(batch=8, seq_len=16)
    rule = broken(model_spec(**{**SIZES, "n_kv_heads": 4}), train, Layout.parse("tp4"))
    assert rule == "layout.tp = 4 must divide model.delta_key_heads = 2"
    halves = TrainSpec(batch=8, seq_len=16, precision="bf16", fp8=True)
    assert "train.fp8 = true has no Gated DeltaNet" in broken(model, halves, Layout.parse("mb1"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"delta_key_heads": 3}, "delta_key_heads = 3 must divide"),
        ({"delta_kernel": 0}, r"need model\.delta_kernel of at least 1"),
        ({"lora": {"rank": 2, "alpha": 4.0}}, "adapters of Gated DeltaNet"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, why):
    fields = model_spec(**SIZES).model_dump()
    with pytest.raises(ValueError, match=why):
        ModelSpec(**{**fields, **change})


def test_layers_that_predict_further_tokens_are_named_and_left_out(tmp_path):
    spec = model_spec(**SIZES)
    save_hf(init_model(build_model(spec, "cpu"), spec, seed=0), tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    save_file(stored | {"mtp.fc.weight": torch.zeros(4, 8)}, path, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"mtp\.\* predicts tokens after the next one"):
        model = load_hf(tmp_path)
    assert model.spec == spec
