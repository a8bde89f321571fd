"""Layers of Mamba-2 in layouts: parity with one device, faults that proofs must catch."""

import functools

import pytest

import recurrent_layouts
from meshwright.layout import Layout, broken
from meshwright.models.mamba import Mamba2
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
    "family": "granitemoehybrid",
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 72,
    "ffn_dim": 48,
    "experts": 0,
    "norm_eps": 1e-3,
    "residual_scale": 0.7,
    "attention_scale": 0.3,
    "layer_pattern": [{"mamba": True}, {"rotary": False}],
    "mamba_heads": 4,
    "mamba_head_dim": 8,
    "mamba_groups": 1,
    "mamba_state": 5,
    "mamba_kernel": 3,
}
MODELS = {
    # All heads in one group, which ranks of tp share.
    "dense": SIZES,
    # Groups that ranks of tp have whole, a longer convolution, most layers recurrent.
    "groups": {
        **SIZES,
        "n_kv_heads": 4,
        "layer_pattern": [{"mamba": True}, {"mamba": True}, {"mamba": True}, {}],
        "mamba_heads": 12,
        "mamba_head_dim": 6,
        "mamba_groups": 4,
        "mamba_kernel": 4,
        "mamba_dt_limit": [0.3, 2.0],
        "tie_embeddings": True,
        "attention_bias": True,
    },
    # Four ranks share two groups, two ranks each.
    "pairs": {**SIZES, "n_kv_heads": 4, "mamba_groups": 2, "mamba_heads": 4},
    "experts": {
        **SIZES,
        "mamba_groups": 2,
        "experts": 4,
        "top_k": 2,
        "expert_ffn_dim": 24,
        "shared_ffn_dim": 48,
    },
}


def case_of(label, model="dense", **asked):
    return recurrent_layouts.case_of(MODELS[model], label, **asked)


CASES = [
    case_of("tp2 mb2", packed=True, seq_len=70),
    case_of("mb4", "groups"),
    case_of("mb2 recompute-selective", "experts", packed=True),
    case_of("mb2 recompute-full", "groups", packed=True, seq_len=130),
    case_of("dp2 mb2", packed=True),
    case_of("tp2 mb2", "groups"),
    case_of("tp2 mb2 recompute-full"),
    case_of("tp2 sp mb2 recompute-selective", packed=True),
    case_of("tp4 mb2", "groups"),
    case_of("tp2 sp mb2 recompute-full", "experts", packed=True),
    case_of("tp2 sp mb2", "groups", precision="bf16"),
    case_of("pp2 1f1b mb2", "groups", packed=True),
    case_of("pp2 interleaved_1f1b v2 mb2", "experts"),
    case_of("shard2 zero1 ep2 mb2", "experts"),
    case_of("shard2 zero2 mb2", "groups", precision="bf16"),
    case_of("shard2 zero3 ep2 mb2 recompute-full", "experts", packed=True),
    case_of("shard2 zero3 mb2 offload-params", "groups"),
    case_of("shard2 zero3 mb2", packed=True, fsdp2=True),
    case_of("mb2 offload-activations", "groups", packed=True),
    case_of("tp2 dp2 ep2 mb2", "experts"),
    case_of("pp2 zbv v2 mb1", "experts", packed=True),
    case_of("mb2", "groups", packed=True, compile=True),
    case_of("tp4 sp mb2", "pairs"),
    case_of("cp2-ring mb2", "groups", packed=True),
    case_of("cp2-ulysses mb2", "experts", packed=True, seq_len=70),
    case_of("cp4-ring mb2", "groups", packed=True),
    case_of("cp4-ulysses mb2 recompute-selective", "pairs"),
    case_of("cp2-ring tp2 sp mb2 recompute-full", packed=True),
    case_of("cp2-ring shard2 zero3 mb2 recompute-selective", packed=True),
    case_of("cp2-ulysses pp2 1f1b mb2", "groups", packed=True),
    case_of("cp2-ring pp2 zbv v2 mb1", "experts"),
    case_of("cp2-ring shard2 zero2 ep2 mb2", "experts", packed=True),
    case_of("cp2-ring mb2", "groups", precision="bf16"),
    case_of("cp2-ring zero3 mb2", packed=True, fsdp2=True),
    case_of("cp2-ulysses mb2 offload-activations", "groups", packed=True),
    case_of("cp2-ring mb2", "groups", packed=True, compile=True),
]


@pytest.mark.often(1)
@pytest.mark.parametrize("case", labelled(CASES))
def test_a_layout_is_one_device(case):
    check_parity(case)


CENSUS = [
    case_of("tp2 mb2"),
    case_of("mb2", "groups", seq_len=70),
    case_of("tp2 sp mb2", "experts"),
    case_of("tp2 sp mb2 recompute-full"),
    case_of("tp2 mb2 recompute-selective"),
    case_of("shard2 zero3 mb2 recompute-full", "groups"),
    case_of("pp2 1f1b mb2"),
    case_of("cp2-ring mb2", "groups", seq_len=140),
    case_of("cp2-ulysses mb2 recompute-selective", packed=True),
    case_of("cp4-ring mb2 recompute-full", "experts"),
    case_of("cp4-ulysses mb2", "pairs"),
    case_of("cp2-ring tp2 sp mb2", "dense"),
]


@pytest.mark.often(1)
@pytest.mark.parametrize("case", labelled(CENSUS))
def test_a_program_is_what_its_ranks_do(case):
    check_census(case)


# Widths at which activations and states weigh about the same.
LARGE = {
    **SIZES,
    "dim": 256,
    "vocab_size": 512,
    "ffn_dim": 512,
    "mamba_heads": 8,
    "mamba_head_dim": 64,
    "mamba_groups": 2,
    "mamba_state": 32,
    "mamba_kernel": 4,
    "layer_pattern": [{"mamba": True}, {"mamba": True}, {"mamba": True}, {}],
}


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("label", "precision"), PEAKS)
def test_the_peak_is_predicted(label, precision, groups):
    check_peak({**LARGE, "mamba_groups": groups}, label, precision)


def layers(parallel):
    """The recurrent layers of a rank."""
    return layers_of(parallel, Mamba2)


def keys_of_own_heads(parallel):
    """The keys and queries of groups have the gradient of a rank's own heads alone."""
    without_sums(parallel, ".bc.weight")


def norm_of_own_features(parallel):
    """A group's norm sees the features of this rank alone."""
    for layer in layers(parallel):
        layer.gated_norm.sums = None


def norm_of_all_features(parallel):
    """A group's norm sees all features of this rank, also those of other groups."""
    for layer in layers(parallel):
        layer.gated_norm.size = layer.gated_norm.weight.shape[0]


def documents_run_on(parallel):
    """States and convolutions pass the borders of documents."""
    run_on(layers(parallel))


def wrong_groups(parallel):
    """A rank's heads read the keys of the first groups."""
    for layer in layers(parallel):
        layer.groups = 0, layer.groups[1]


FAULTS = [
    (norm_of_own_features, case_of("tp2 mb2")),
    (keys_of_own_heads, case_of("tp2 mb2")),
    (documents_run_on, case_of("mb2", packed=True)),
    (norm_of_all_features, case_of("mb2", "groups")),
    (wrong_groups, case_of("tp2 mb2", "groups")),
]


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("fault", "case"),
    [pytest.param(*seeded_fault, id=seeded_fault[0].__name__) for seeded_fault in FAULTS],
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
@pytest.mark.parametrize("groups", [1, 8])
def test_a_published_model_is_proven_by_a_small_one_with_all_it_has(groups, tp):
    model = model_spec(preset="granite-4.0-h-micro", mamba_groups=groups)
    train = TrainSpec(batch=8, seq_len=64)
    layout = Layout.parse(f"tp{tp} mb2" if tp > 1 else "mb2")
    for small in shrink(model, train, layout):
        assert small.model.has_mamba
        assert small.model.mamba_heads % small.layout.tp == 0
        lost = not_kept(Case(model, train, layout), small)
        assert [name for name in lost if "recurrence" in name or "group of" in name] == []


def test_layouts_that_cut_states_or_heads_are_refused():
    model, train = model_spec(**SIZES), TrainSpec(batch=8, seq_len=16)
    sizes = {**SIZES, "n_heads": 8, "n_kv_heads": 8, "dim": 64, "mamba_heads": 12}
    rule = broken(model_spec(**sizes), train, Layout.parse("tp8"))
    assert rule == "layout.tp = 8 must divide model.mamba_heads = 12"
    rule = broken(model_spec(**{**sizes, "mamba_groups": 3}), train, Layout.parse("tp2"))
    assert "it must divide model.mamba_groups = 3, or be a multiple" in rule
    halves = TrainSpec(batch=8, seq_len=16, precision="bf16", fp8=True)
    assert "train.fp8 = true has no Mamba-2" in broken(model, halves, Layout.parse("mb1"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mamba_groups": 3}, "mamba_groups = 3 must divide"),
        ({"mamba_kernel": 0}, r"need model\.mamba_kernel of at least 1"),
        ({"mamba_dt_limit": [2.0, 1.0]}, "the least step is the first"),
        ({"lora": {"rank": 2, "alpha": 4.0}}, "adapters of Mamba-2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, why):
    fields = model_spec(**SIZES).model_dump()
    with pytest.raises(ValueError, match=why):
        ModelSpec(**{**fields, **change})
