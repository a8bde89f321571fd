"""Adapters of experts, of shared experts and of latent attention: layouts, faults, configs."""

from dataclasses import replace

import pytest

from meshwright.bench.memory_breakdown import measure
from meshwright.comm.groups import open_groups
from meshwright.cost.timeline import timeline
from meshwright.errors import ConfigError
from meshwright.layout import Layout, broken
from meshwright.models import build_model
from meshwright.parallel.apply import Parallel
from meshwright.parallel.user_models.parallelize import _refuse_adapters
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.prove.parity import check
from meshwright.simulate.simulation import simulate
from meshwright.spec.loading import load_config
from meshwright.spec.parts import parts, trained_parameter_count
from meshwright.spec.training import OptimizerSpec
from ranks import on_ranks
from seeded import without_sums
from test_conformance_kept import kept
from test_expert_parallel import summed_over_other_experts
from test_lora import DROPS, MEASURED, MIXTURE, SHARED, TRAIN, WIDE, case_of, model, proven

ATTENTION = ("q_proj", "v_proj")
# One by one, as files have experts, and in memory.
APART = ("gate_proj", "up_proj", "down_proj")
JOINT = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
OSS = {"family": "gpt_oss", "experts": 4, "top_k": 2}
LATENT = {
    "family": "deepseek_v3",
    "experts": 4,
    "top_k": 2,
    "expert_ffn_dim": 32,
    "shared_ffn_dim": 32,
    "dense_layers": 1,
    "expert_groups": 1,
    "top_groups": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_kv_heads": 4,
    "head_dim": 8,
}
OF_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
CASES = [
    case_of("dp2 mb2", targets=(*ATTENTION, *APART), **MIXTURE),
    case_of("dp1 mb4 recompute-full", targets=JOINT, **MIXTURE),
    # The first rank of the pipeline has a dense layer alone, so nothing to train.
    case_of("pp2 mb4", targets=JOINT, **LATENT),
    case_of("pp2 mb2", "fp16", targets=JOINT, **LATENT),
    case_of("pp2 mb4 offload-optimizer recompute-full", "bf16", targets=JOINT, **LATENT),
    case_of("shard2 zero3 pp2 mb2", targets=JOINT, **LATENT),
    case_of("shard2 zero1 pp2 mb2", targets=JOINT, **LATENT),
    case_of("tp2 mb4", targets=APART, **SHARED),
    case_of("tp2 sp mb4", targets=(*JOINT, "o_proj"), **SHARED),
    case_of("tp2 mb4", targets=("gate_up_proj", "down_proj"), **OSS),
    case_of("tp2 mb4 recompute-selective", "bf16", targets=JOINT, **MIXTURE),
    case_of("dp2 ep2 mb2", targets=JOINT, **MIXTURE),
    case_of("shard2 zero3 ep2 mb2 recompute-full", targets=APART, **SHARED),
    case_of("shard2 zero1 mb2", "bf16", targets=APART, **MIXTURE),
    case_of("shard2 zero2 mb2", targets=("down_proj",), **MIXTURE),
    case_of("shard2 zero3 mb2", targets=JOINT, **MIXTURE),
    case_of("pp2 1f1b mb2", targets=("gate_up_proj",), **OSS),
    case_of("dp2 cp2-ring ep2 mb2", targets=(*ATTENTION, *JOINT), **MIXTURE),
    case_of("dp2 tp2 sp ep2 mb2", targets=APART, **SHARED),
    case_of("tp2 mb4", targets=("shared_expert.*", "q_proj"), **SHARED, **DROPS),
    case_of("tp2 sp mb4", targets=OF_LATENT, **LATENT, **DROPS),
    case_of("tp2 mb4 recompute-full", targets=("all-linear",), **LATENT),
    case_of("dp2 ep2 mb2", targets=("*_proj",), **LATENT),
]


@pytest.mark.often(1)
@pytest.mark.parametrize("case", CASES, ids=lambda one: one.label)
def test_layouts_train_the_same_adapters(case):
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []
        assert "frozen weights, bit for bit" in [verdict.claim for verdict in verdicts]


# What dispatch keeps, it keeps itself: not as saved tensors, and through a second forward.
KEPT = [one for one in CASES if one.layout.ep == 1 or one.layout.recompute == "none"]


@pytest.mark.often(2)
@pytest.mark.parametrize("case", KEPT, ids=lambda one: one.label)
def test_adapters_keep_what_the_program_says(case):
    """With as many tokens for each rank's experts as the program counts with."""
    case = replace(case, train=case.train.model_copy(update={"routing": "balanced"}))
    for stages in on_ranks(case.layout.world, kept, case=case):
        for expected, left, saved in stages:
            assert left == expected
            if case.layout.recompute == "none" and case.layout.ep == 1:
                assert saved == expected


@pytest.mark.slow  # test_lora has it for dense models
@pytest.mark.often(1)
@pytest.mark.parametrize(
    "label", ["shard2 zero1", "shard2 zero2 ep2 recompute-full", "shard2 zero3"]
)
def test_fsdp2_trains_adapters_of_experts(label):
    case = case_of(f"{label} mb2", "bf16", targets=(*ATTENTION, *JOINT), **MIXTURE)
    for verdicts in on_ranks(2, proven, case=replace(case, fsdp2=True)):
        assert [verdict for verdict in verdicts if not verdict.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "more"),
    [
        ("tp2 sp mb2", {"targets": (*JOINT, "q_proj"), **SHARED}),
        ("shard2 zero1 ep2 mb2", {"targets": APART, **SHARED}),
        ("tp2 mb2", {"targets": OF_LATENT, **LATENT}),
    ],
)
def test_a_rehearsal_does_what_the_program_says(label, more):
    config, case = load_config(None, []), case_of(label, "bf16", **more)
    config = config.model_copy(update={"model": case.model, "train": case.train})
    (one,) = simulate(config, case.layout, [1]).ranks
    assert one.differences == []


# Faults.


def unsummed(parallel: Parallel) -> None:
    """Take the gradient of a part of each expert's width for that of all of it."""
    without_sums(parallel, "experts.gate.lora_a", "experts.up.lora_a")


def unsummed_down(parallel: Parallel) -> None:
    """The same where the width is what is multiplied first."""
    without_sums(parallel, "experts.down.lora_b")


FAULTS = {
    "a part of each width": (unsummed, "tp2 mb4", APART, "experts.up.lora_a"),
    "a part of each output": (unsummed_down, "tp2 sp mb4", JOINT, "experts.down.lora_b"),
    "other experts": (summed_over_other_experts, "dp2 ep2 mb2", JOINT, "experts.down.lora_b"),
}


def faulty(world, name):
    fault, label, targets, _ = FAULTS[name]
    case = case_of(label, targets=targets, **MIXTURE)
    return check(case, open_groups(case.layout, world), world, fault=fault)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name):
    verdicts = {one.claim: one for one in on_ranks(2, faulty, name=name)[0]}
    assert not verdicts["gradients"].passed
    assert FAULTS[name][3] in str(verdicts["gradients"].first_divergence)


def test_parameters_are_those_of_the_table():
    for more in (
        {"targets": (*ATTENTION, *APART), **SHARED},
        {"targets": JOINT, **MIXTURE},
        {"targets": ("gate_up_proj",), **OSS},
        {"targets": ("*",), **LATENT},
    ):
        spec = model(**more)
        assert [
            (n, tuple(p.shape), p.requires_grad) for n, p in build_model(spec).named_parameters()
        ] == [(one.name, one.shape, one.trained) for one in parts(spec)]
    one = trained_parameter_count(model(targets=APART, **MIXTURE))
    assert one == 2 * 4 * 4 * 3 * (32 + 48)
    # Gate and up have A together.
    assert trained_parameter_count(model(targets=JOINT, **MIXTURE)) == one - 2 * 4 * 4 * 32


@pytest.mark.slow  # test_lora has it for dense models
@pytest.mark.often(1)
@pytest.mark.parametrize(
    "label",
    [
        *("tp2 mb2", "shard2 zero1 ep2 mb2"),
        "pp2 looped_bfs v2 mb2 offload-activations",  # the forward of a layer takes most
        "shard2 zero3 ep2 mb2 offload-params",  # frozen experts come from the host
    ],
)
def test_memory_is_predicted(label):
    """Of wide experts, whose tokens are as many on each rank."""
    wide = {**WIDE, "experts": 4, "top_k": 2, "expert_ffn_dim": 256, "family": "qwen3_moe"}
    spec = model(rank=16, targets=JOINT, **wide)
    train = MEASURED.model_copy(update={"routing": "balanced"})
    case = Case(spec, train, Layout.parse(label))
    measured = on_ranks(2, peak_of, case=case)[0]
    said = timeline(lower(spec, train, OptimizerSpec(), case.layout), 0).peak.total
    assert said == pytest.approx(measured, rel=0.04)


def peak_of(world, case):
    return measure(world, case).peak.total


def test_own_loops_do_not_cut_adapters_of_experts():
    spec = model(targets=("down_proj",), **MIXTURE)
    with pytest.raises(ConfigError, match=r"experts\.down has a low-rank adapter"):
        _refuse_adapters(build_model(spec), Layout(tp=2))


# Configs.

FOUR_EXPERTS = ("model.family=qwen3_moe", "model.experts=4", "model.top_k=2", "lora.rank=4")


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        ("all-linear", "attn.q attn.k attn.v attn.o"),
        ("gate_proj", "mlp.experts.gate"),
        ("experts.gate_proj", "mlp.experts.gate"),
        ("gate_up_proj", "mlp.experts.gate_up"),
        ("mlp.experts.down_proj", "mlp.experts.down"),
        ("mlp.*_proj", ""),
        ("experts.*_proj", "mlp.experts.gate mlp.experts.up mlp.experts.down"),
    ],
)
def test_targets_of_experts(targets, adapted):
    asked = [*FOUR_EXPERTS, f"lora.targets={targets}"]
    if not adapted:
        with pytest.raises(ConfigError, match="not a linear layer"):
            load_config(None, asked)
        return
    assert load_config(None, asked).model.adapted == set(adapted.split())


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (['lora.targets=["gate_up_proj", "up_proj"]'], "one adapter for both"),
        (["lora.targets=down_proj", "lora.dropout=0.1"], "nearest legal: lora.dropout = 0"),
        (["lora.targets=router"], "which is not a linear layer of the qwen3_moe family"),
        (["lora.targets=gate"], "which is not a linear layer"),
    ],
)
def test_what_experts_do_not_have_is_refused(overrides, told):
    with pytest.raises(ConfigError) as error:
        load_config(None, [*FOUR_EXPERTS, *overrides])
    assert told in str(error.value)


ALONE = {"experts": 0, "top_k": 0, "shared_ffn_dim": 0, "dense_layers": 0, "expert_ffn_dim": None}


@pytest.mark.parametrize(
    ("more", "told"), [(MIXTURE, "model.experts = 4"), (LATENT | ALONE, "latent attention")]
)
def test_what_is_not_kept_in_four_bits_is_refused(more, told):
    spec = model(targets=("o_proj",), **more)
    spec = spec.model_copy(update={"lora": spec.lora.model_copy(update={"base": "nf4"})})
    assert told in broken(spec, TRAIN, Layout())
