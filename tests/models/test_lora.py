"""Low-rank adapters: parity on layouts, faults that proofs catch, memory, what is refused."""

from dataclasses import replace

import pytest

from meshwright.bench.memory_breakdown import measure
from meshwright.comm.groups import open_groups
from meshwright.cost.timeline import timeline
from meshwright.errors import ConfigError
from meshwright.layout import Layout, broken
from meshwright.models import build_model
from meshwright.models.lora import LoraLinear
from meshwright.parallel.apply import Parallel
from meshwright.parallel.user_models.parallelize import _refuse_adapters
from meshwright.program.collectives import collectives
from meshwright.program.flops import matmul_flops
from meshwright.program.lower import lower
from meshwright.program.model_flops import flops_per_token
from meshwright.prove.case import Case
from meshwright.prove.conformance import prove_conformance
from meshwright.prove.parity import check, prove_parity
from meshwright.runtime.machines.engine import check_engine
from meshwright.simulate.simulation import simulate
from meshwright.spec.dump import to_toml
from meshwright.spec.loading import load_config
from meshwright.spec.lora import Lora
from meshwright.spec.parts import parts, trained_parameter_count
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from ranks import on_ranks
from seeded import without_sums

SMALL = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 96, "ffn_dim": 48}
TRAIN = TrainSpec(batch=8, seq_len=16, seed=3)
NEOX = {"n_kv_heads": 4, "targets": ("dense*",)}
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model(family="llama", dropout=0.0, targets=("all-linear",), alpha=6.0, rank=4, **sizes):
    """A small model with adapters."""
    lora = Lora(rank=rank, alpha=alpha, targets=targets, dropout=dropout)
    plain = model_spec(**{**SMALL, "family": family, **sizes})
    return plain.model_copy(update={"lora": lora})


def case_of(label, precision="fp32", **more):
    return Case(
        model(**more), TRAIN.model_copy(update={"precision": precision}), Layout.parse(label)
    )


def proven(world, case):
    groups = open_groups(case.layout, world)
    return (*prove_parity(case, groups, world), *prove_conformance(case, groups, world))


DROPS, FOUR = {"dropout": 0.2}, {"n_layers": 4}
MIXTURE = {"family": "qwen3_moe", "experts": 4, "top_k": 2, "expert_ffn_dim": 48}
SHARED = {**MIXTURE, "family": "qwen2_moe", "shared_ffn_dim": 32}
CASES = [
    case_of("dp1 recompute-full", targets=("q_proj", "v_proj"), **DROPS),
    case_of("dp2"),
    case_of("dp2 recompute-full", targets=("up_proj",)),
    case_of("dp2", "fp16"),
    case_of("dp2", "fp16", rank=1, alpha=12.0),
    case_of("shard2 zero1", **DROPS),
    case_of("shard2 zero2", "bf16"),
    case_of("shard2 zero3", targets=("q_proj", "v_proj")),
    case_of("shard2 zero1 offload-optimizer"),
    case_of("shard2 zero3 offload-params"),
    case_of("tp2", **DROPS),
    case_of("tp2 recompute-full"),
    case_of("tp2 sp", targets=("o_proj", "up_proj"), **DROPS),
    case_of("tp2 sp recompute-selective", "bf16", **DROPS),
    case_of("tp2 sp recompute-full", "fp32", targets=("*_proj",)),
    case_of("tp2", family="neox", **NEOX, **DROPS),
    case_of("tp2 sp", family="qwen3"),
    case_of("tp2 recompute-full", family="olmo2"),
    case_of("cp2-ring", **DROPS),
    case_of("cp2-ulysses", **DROPS),
    case_of("pp2 gpipe", tie_embeddings=True),
    case_of("pp2 v2 interleaved_1f1b", **FOUR),
    case_of("pp2 v2 zbv", **FOUR),
    case_of("dp2 shard2 zero3"),
    case_of("shard2 tp2 sp zero3", **DROPS),
    case_of("pp2 tp2 sp", tie_embeddings=True),
    case_of("tp2 cp2-ring sp", **DROPS),
    # Frozen experts, of which ranks of ep have their own.
    case_of("dp1 mb4 recompute-full", **SHARED),
    case_of("tp2 sp mb4", **SHARED, **DROPS),
    case_of("shard2 zero1 mb2", "bf16", **MIXTURE),
    case_of("shard2 zero3 mb2", **MIXTURE),
    case_of("dp2 ep2 mb2", targets=("q_proj", "v_proj"), **MIXTURE),
    case_of("shard2 zero3 ep2 mb2 recompute-full", **MIXTURE),
    case_of("pp2 1f1b mb2", family="gpt_oss", experts=4, top_k=2),
    case_of("tp2 mb4 recompute-selective", "bf16", family="gpt_oss", experts=4, top_k=2),
]
# By the code that GPUs take, and in more roundings: the others have each of their parts.
SLOW = [
    case_of("shard2 zero3 offload-params", "bf16"),
    case_of("pp2 v2 shard2 zero2 zbv", "bf16", **FOUR),
    case_of("tp2", family="gemma2", head_dim=8),
    case_of("cp2-ring shard2 zero3", "bf16", **DROPS),
]


@pytest.mark.often(1)
@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)],
    ids=lambda one: one.label,
)
def test_layouts_train_the_same_adapters(case):
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []
        assert "frozen weights, bit for bit" in [verdict.claim for verdict in verdicts]


@pytest.mark.slow
@pytest.mark.parametrize("label", ["shard2 zero1", "shard2 zero2 recompute-full", "shard2 zero3"])
def test_fsdp2_leaves_frozen_weights_alone(label):
    case = replace(case_of(label, "bf16", targets=("q_proj", "down_proj")), fsdp2=True)
    for verdicts in on_ranks(2, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []


# Faults.


def unsummed(parallel: Parallel) -> None:
    """Take a gradient of a part of the outputs for that of all."""
    without_sums(parallel)


def rescaled(parallel: Parallel) -> None:
    """Scale by alpha alone."""
    for module in parallel.modules.values():
        for layer in module.modules():
            if isinstance(layer, LoraLinear):
                layer.scale = 6.0


def thawed(parallel: Parallel) -> None:
    """Decay a weight that is frozen whenever gradients are there."""
    module = parallel.modules[max(parallel.modules)]
    weight = module.blocks[-1].attn.q.weight

    def decay(*_):
        weight.data.mul_(0.99)  # unknown to autograd, as an optimizer's update between steps

    module.register_forward_hook(decay)


def dropped_alike(parallel: Parallel) -> None:
    """Give the ranks of tp one mask for channels that are unlike."""
    for module in parallel.modules.values():
        for layer in module.modules():
            if isinstance(layer, LoraLinear) and hasattr(layer, "tp_region"):
                added = layer.added
                layer.added = lambda out, x, context, first=0, added=added: added(out, x, context)


FAULTS = {
    "unsummed": (unsummed, "tp2", {}, "gradients"),
    "rescaled": (rescaled, "dp2", {}, "loss"),
    "thawed": (thawed, "dp2", {}, "frozen weights, bit for bit"),
    "dropped": (dropped_alike, "tp2", DROPS, "loss"),
}


def faulty(world, name):
    fault, label, more, _ = FAULTS[name]
    case = case_of(label, **more)
    return check(case, open_groups(case.layout, world), world, fault=fault)


@pytest.mark.often(1)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name):
    verdicts = on_ranks(2, faulty, name=name)[0]
    assert FAULTS[name][3] in [verdict.claim for verdict in verdicts if not verdict.passed]


# What follows from weights that are frozen.


def test_parameters_and_first_adapters():
    spec = model(targets=("q_proj", "down_proj"))
    built = build_model(spec)
    assert [(n, tuple(p.shape), p.requires_grad) for n, p in built.named_parameters()] == [
        (one.name, one.shape, one.trained) for one in parts(spec)
    ]
    assert trained_parameter_count(spec) == 2 * 4 * ((32 + 32) + (48 + 32))


def test_what_is_frozen_costs_no_products_and_no_messages():
    whole, some = case_of("shard2 zero1 tp2 sp"), model(targets=("q_proj",), rank=1)
    plain = lower(
        whole.model.model_copy(update={"lora": None}), TRAIN, OptimizerSpec(), whole.layout
    )
    tuned = lower(some, TRAIN, OptimizerSpec(), whole.layout)
    # Of three products of a weight two are left, and those of the adapters are small.
    assert 0.66 < matmul_flops(tuned, 0) / matmul_flops(plain, 0) < 0.7
    assert 0.66 < flops_per_token(some, 16) / flops_per_token(plain.model, 16) < 0.8
    for program in (plain, tuned):
        sums = sum(
            one.bytes * one.count for one in collectives(program, 0) if one.purpose == "gradients"
        )
        weights = sum(
            one.bytes * one.count for one in collectives(program, 0) if one.purpose == "weights"
        )
        assert sums < 20_000 or program is plain
        assert weights < 10_000 or program is plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "more"),
    [
        ("pp2 1f1b mb1", {"tie_embeddings": True}),
        ("tp2 sp mb2", DROPS),
        ("shard2 zero1 mb2", {}),
        ("shard2 zero3 mb2 recompute-full", {}),
        ("tp2 sp mb2", SHARED),
        ("shard2 zero1 ep2 mb2", MIXTURE),
    ],
)
def test_a_rehearsal_does_what_the_program_says(label, more):
    config = load_config(None, [])
    case = case_of(label, "bf16", **more)
    config = config.model_copy(update={"model": case.model, "train": case.train})
    (one,) = simulate(config, case.layout, [1]).ranks
    assert one.differences == []


WIDE = {
    "dim": 128,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 256,
    "vocab_size": 512,
}
MEASURED = TrainSpec(batch=8, seq_len=128, matmul="torch")


def peaks(world, label, spec):
    return measure(world, Case(spec, MEASURED, Layout.parse(label))).peak.total


@pytest.mark.slow
@pytest.mark.parametrize("label", ["shard2 zero1 mb2", "tp2 mb2"])
def test_memory_is_predicted_and_less_than_of_all_weights(label):
    tuned = model(**WIDE, rank=8)
    found = {}
    for spec in (tuned, tuned.model_copy(update={"lora": None})):
        program = lower(spec, MEASURED, OptimizerSpec(), Layout.parse(label))
        found[spec.lora is None] = on_ranks(2, peaks, label=label, spec=spec)[0]
        said = timeline(program, 0).peak.total
        assert said == pytest.approx(found[spec.lora is None], rel=0.05)
    assert found[False] < 0.75 * found[True]


@pytest.mark.slow
def test_memory_is_predicted_where_a_forward_holds_most():
    label, tuned = "pp2 naive mb2 recompute-selective", model(**WIDE, rank=8)
    measured = on_ranks(2, peaks, label=label, spec=tuned)
    for rank, program in enumerate(
        [lower(tuned, MEASURED, OptimizerSpec(), Layout.parse(label))] * 2
    ):
        peak = timeline(program, rank).peak
        assert peak.action.startswith("F")
        assert peak.total == pytest.approx(measured[rank], rel=0.05)


# Configs.

FOUR_EXPERTS = ("model.family=qwen3_moe", "model.experts=4", "model.top_k=2")


def test_a_config_says_what_is_adapted(tmp_path):
    config = load_config(None, ["lora.rank=4", 'lora.targets=["q_proj", "*_proj"]'])
    assert config.model.lora == Lora(rank=4, alpha=4.0, targets=("q_proj", "*_proj"))
    assert config.model.adapted >= {"attn.q", "attn.o", "mlp.down"}
    assert Lora(rank=4, alpha=8.0, rslora=True).scale == 4.0
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert load_config(file).model == config.model
    assert load_config(None).model.lora is None
    assert "lora" not in load_config(None).model.identity()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["lora.rank=4", "lora.targets=q_prj"], "nearest legal: 'q_proj'"),
        (["lora.rank=4", "lora.targets=[]"], "lora.targets is empty"),
        (["lora.rank=4", "model.family=neox"], "stores query_key_value as one matrix"),
        (["lora.rank=4", "model.family=phi3", "lora.targets=qkv_proj"], "'o_proj'"),
        (["lora.rank=4", "lora.targets=router", *FOUR_EXPERTS], "is not a linear layer of the"),
        (["lora.rank=-1"], "lora.rank = -1"),
        (["lora.ranks=4"], "nearest legal: lora.rank"),
        (["model.lora=4"], "unknown key model.lora"),
        (["dpo.beta=0.1"], "Preference optimisation is not supported"),
    ],
)
def test_what_cannot_be_adapted_is_refused(overrides, told):
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert told in str(error.value)


def test_what_adapters_do_not_go_with_is_refused():
    config = load_config(None, ["lora.rank=4", "train.engine=deepspeed"])
    with pytest.raises(ConfigError, match=r"does not go with lora\.rank = 4"):
        check_engine(config, Layout(), resumes=False)
    wide = model(**WIDE)
    train = TrainSpec(batch=16, seq_len=16, precision="bf16", fp8=True)
    assert "train.fp8 = true has no adapters" in broken(wide, train, Layout())
    with pytest.raises(ConfigError, match=r"layers\.0\.attn\.q has a low-rank adapter"):
        _refuse_adapters(build_model(model()), Layout(tp=2))
