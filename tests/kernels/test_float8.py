"""Float8: what is refused, how far off products are, and which gathers are in it."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from graphs import compiled
from meshwright.comm.groups import open_groups
from meshwright.cost.timeline import timeline
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.layout.rules import broken, nearest_legal
from meshwright.parallel.build import build, seeded
from meshwright.program.collectives import collectives
from meshwright.program.lower import lower
from meshwright.program.target import Target
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine, program_of
from meshwright.prove.suite import Suite
from meshwright.runtime.machines import engine
from meshwright.runtime.session import prepare_job
from meshwright.simulate.dry_run import dry_run
from meshwright.simulate.on_standin import watch
from meshwright.spec.parts import parts
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from ranks import on_ranks
from runs import clean_environ

MODEL = model_spec(vocab_size=128, dim=64, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=128)
TRAIN = TrainSpec(batch=4, seq_len=32, precision="bf16", fp8=True)

REFUSED = [
    ("tp2 mb2", {}, "layout.tp = 2 cuts linear layers", "layout.tp = 1"),
    ("pp2 zbv v2 mb1", {}, "layout.schedule = zbv defers matmuls", "layout.schedule = looped_bfs"),
    ("mb1", {"seq_len": 24}, "tokens of a microbatch = 24 must be", "layout.microbatch = 2"),
    ("mb2", {"precision": "fp32"}, "requires train.precision = bf16", "train.precision = bf16"),
    ("mb2", {"precision": "fp16"}, "requires train.precision = bf16", "train.fp8 = false"),
]


@pytest.mark.parametrize(("label", "changes", "rule", "legal"), REFUSED)
def test_where_it_cannot_work_the_nearest_legal_is_told(label, changes, rule, legal):
    layout, train = Layout.parse(label), TRAIN.model_copy(update=changes)
    assert rule in broken(MODEL, train, layout)
    assert legal in nearest_legal(MODEL, train, layout)


@pytest.mark.parametrize(("key", "size"), [("dim", 72), ("ffn_dim", 100)])
def test_odd_sizes_are_refused(key, size):
    spec = MODEL.model_copy(update={key: size})
    assert f"model.{key} = {size} must be a multiple of 16" in broken(spec, TRAIN, Layout())


def test_what_is_missing_is_refused_before_any_process_starts(config, monkeypatch):
    words = ("train.fp8=true", "train.precision=bf16", "layout.microbatch=2")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchao" else real(name)
    )
    with pytest.raises(ConfigError, match=r"pip install 'meshwright\[fp8\]'"):
        prepare_job(config(*words), clean_environ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(engine, "gpu_name", lambda: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(ConfigError, match="A100-SXM4-80GB has no float8 matmuls"):
        engine.check_fp8(config(*words), "cuda")
    monkeypatch.setattr(engine, "gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    engine.check_fp8(config(*words), "cuda")


GPU = Target("gpu")  # where FSDP2 keeps every ZeRO


def gathers(label, target=GPU, **changes):
    """What ranks send of weights in a step: the gathers, and what decides the scales."""
    train = TRAIN.model_copy(update=changes)
    found = collectives(lower(MODEL, train, OptimizerSpec(), Layout.parse(label), target), 0)
    return [one for one in found if one.purpose in ("weights", "scales")]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_fsdp2_gathers_a_byte_for_each_weight_of_a_product(zero):
    found, *others = gathers(f"shard2 zero{zero} mb2")
    plain = gathers(f"shard2 zero{zero} mb2", fp8=False)
    matrices = [part for part in parts(MODEL) if part.name.startswith("layers.") and part.is_matmul]
    assert (found.kind, found.axis, found.count) == ("all_reduce", "shard", 1)
    assert (found.phase, found.purpose, found.bytes) == ("step", "scales", 4 * len(matrices))
    saved = sum(part.numel for part in matrices) // MODEL.n_layers
    assert len(others) == len(plain)
    for one, wide in zip(others, plain, strict=True):
        is_block = one.reason == "ZeRO: the weights of a block"
        assert one == replace(wide, bytes=wide.bytes - saved * is_block)


@pytest.mark.parametrize(
    ("label", "target"),
    [
        ("shard2 zero3 mb2", Target("cpu")),  # rows, by our own exchange
        ("shard2 zero3 mb2 offload-params", GPU),
        ("dp2 mb2", GPU),
    ],
)
def test_elsewhere_they_travel_as_without_float8(label, target):
    assert gathers(label, target) == gathers(label, target, fp8=False)


LABELS = [
    "dp2 mb2 recompute-selective",
    "shard2 zero3 mb2 recompute-full",
    "pp2 1f1b mb2",
    "cp2 mb2",
]


@pytest.mark.parametrize("label", LABELS)
def test_gradients_are_within_the_bound(label):
    torchao()
    for verdicts in on_ranks(2, proven, label=label):
        for verdict in verdicts:
            assert verdict.passed, verdict
        gradients = next(one for one in verdicts if one.claim == "gradients")
        # Not that of bf16: something was computed in float8.
        assert gradients.observed > 2.0**-5


def proven(world, label, fsdp2=False, **changes):
    train = TRAIN.model_copy(update=changes)
    return Suite(world).prove(Case(MODEL, train, Layout.parse(label), fsdp2=fsdp2))


GATHERED = [
    "shard2 zero3 mb2",
    "shard3 zero3 mb1 recompute-full",  # rows that three ranks can't share evenly
    *(
        pytest.param(label, marks=pytest.mark.slow)
        for label in (
            "shard2 zero2 mb2 recompute-selective",
            "shard2 zero1 mb1",
            "dp2 shard2 zero3 mb1",
            "shard2 cp2 zero3 mb2",
            "zero3 shard2 pp2 interleaved_1f1b v2 mb1",
            "shard2 zero3 mb2 offload-params",
            "shard2 zero3 mb2 offload-optimizer",
        )
    ),
]


@pytest.mark.parametrize("label", GATHERED)
def test_layouts_that_gather_in_float8_are_proven(label):
    torchao()
    world = Layout.parse(label).world
    for verdicts in on_ranks(world, proven, label=label, fsdp2=True, batch=3 if world == 3 else 4):
        assert [verdict for verdict in verdicts if not verdict.passed] == []
        assert "collectives" in [verdict.claim for verdict in verdicts]


def losses(world, label, fsdp2, batch):
    """A held-out batch's loss before and after weights change, and what the optimizer gets."""
    train = TRAIN.model_copy(update={"batch": batch})
    case = Case(MODEL, train, Layout.parse(label), fsdp2=fsdp2)
    program = program_of(case, world)
    groups = open_groups(program.layout, world)
    parallel = build(program, groups, world.device, seeded(MODEL, 0))
    rows = mine(make_batch(case, 0), program, world)
    found = [parallel.evaluate([rows])[0]]
    for held in parallel.held:
        held.shard.mul_(1.1)
    found.append(parallel.evaluate([rows])[0])
    shards = [held.shard for held in parallel.held]
    return found, {(type(one), hasattr(one, "fsdp_pre_all_gather")) for one in shards}


@pytest.mark.parametrize(("label", "batch"), [("shard2 zero3 mb2", 4), ("shard3 zero3 mb1", 3)])
def test_a_gathered_weight_is_to_the_bit_what_each_rank_would_round(label, batch):
    torchao()
    ranks = Layout.parse(label).world
    ours, theirs = (
        on_ranks(ranks, losses, label=label, fsdp2=fsdp2, batch=batch) for fsdp2 in (True, False)
    )
    for (found, shards), (expected, _) in zip(ours, theirs, strict=True):
        assert found == expected
        assert found[0] != found[1]
        assert shards == {(torch.Tensor, False)}


WIDE = MODEL.model_copy(update={"dim": 128, "head_dim": 32, "ffn_dim": 256, "vocab_size": 512})


@pytest.mark.parametrize("label", ["shard2 zero3 mb2", "shard3 zero3 mb2 recompute-full"])
def test_a_rehearsal_gathers_the_bytes_that_are_predicted(label):
    torchao()
    train = TRAIN.model_copy(update={"batch": 12, "seq_len": 64})
    program = lower(WIDE, train, OptimizerSpec(), Layout.parse(label), Target("cpu", fsdp2=True))
    found, said = dry_run(program, 0), timeline(program, 0)
    most = max(moment.held.get("gathered", 0) for moment in said.moments)
    assert max(phase.peak["gathered"] for phase in found.phases) == most
    assert found.worst.peak["buffers"] == said.peak.held["communication buffers"]
    # Besides, at this moment, what the program counts of activations is a bound.
    assert said.peak.total == pytest.approx(found.worst.total, rel=0.06)


def test_a_gpu_rounds_in_the_order_of_its_streams():
    torchao()
    specs = {"model": MODEL, "train": TRAIN, "optimizer": OptimizerSpec()}
    cases = [
        {
            **{name: one.model_dump_json() for name, one in specs.items()},
            "layout": Layout.parse(label).model_dump_json(),
            "packed": False,
            "ranks": [0],
        }
        for label in ("dp2 shard2 zero3 mb1", "shard2 zero2 mb2 recompute-full")
    ]
    for found in watch(cases):
        assert found.passed, found


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["", " recompute-selective", " recompute-full"])
def test_a_block_of_gathered_float8_is_one_graph(recompute):
    torchao()
    found = compiled(f"shard2 zero3 mb1{recompute}", GPU, model=MODEL, fp8=True)
    assert found.graphs == 1, found
    assert found.calls, found
    assert not found.breaks, found


def torchao():
    pytest.importorskip("torchao", reason="torchao is not installed: pip install '.[fp8]'")
