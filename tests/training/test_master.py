"""Weights in bf16 without fp32 masters: their updates, on every kind of layout, and their files."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import saved_steps
from conformance_cases import make
from meshwright.comm.groups import open_groups
from meshwright.cost.timeline import timeline
from meshwright.errors import ConfigError
from meshwright.layout import Layout, resolve_layout
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.program.optimizer import saved_bytes
from meshwright.prove.suite import Suite
from meshwright.runtime.machines.machine import detect
from meshwright.simulate.dry_run import dry_run
from meshwright.spec.loading import load_config
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.parts import Part, parts
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer, step_scaled
from ranks import on_ranks
from saved_steps import check_read_by, go_on, write

PURE = TrainSpec(batch=12, seq_len=16, precision="bf16", master="none")
SAME = PURE.model_copy(update={"reduce_dtype": "same"})
PART = Part("m", (64, 48), ("ffn", "dim"))
FINITE = torch.tensor(1.0, dtype=torch.float64)
ROUNDINGS = ("nearest", "stochastic")


def spec_of(name, rounding, **others):
    return OptimizerSpec(name=name, rounding=rounding, warmup_steps=2, **others)


def narrow_weight(wide):
    weight = nn.Parameter(wide.bfloat16())
    weight.grad_dtype = None
    return weight


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_to_nearest_is_that_of_fp32_weights_rounded(name):
    """From the same weights and states: no more is rounded than the new weight."""
    torch.manual_seed(0)
    start = torch.randn(PART.shape).bfloat16().float()
    spec = spec_of(name, "nearest", lr=0.05)
    narrow, wide = narrow_weight(start), nn.Parameter(start.clone())
    optimizers = [build_optimizer([weight], [PART], spec) for weight in (narrow, wide)]
    for _ in range(3):
        gradient = torch.randn(PART.shape)
        wide.data.copy_(narrow.detach())
        for weight, optimizer in zip((narrow, wide), optimizers, strict=True):
            weight.grad = 4 * gradient
            step_scaled(optimizer, FINITE, 4.0, 0.0)
        assert torch.equal(narrow.detach(), wide.detach().bfloat16())
    assert not torch.equal(narrow.detach().float(), start)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_small_updates_add_up_with_stochastic_rounding_alone(name):
    """Each step moves by less than half the distance of two numbers of bf16."""
    moved = {}
    for rounding in ROUNDINGS:
        spec = spec_of(name, rounding, lr=1e-4, weight_decay=0.0, momentum=0.0)
        weight = narrow_weight(torch.ones(PART.shape))
        optimizer = build_optimizer([weight], [Part("m", PART.shape, ("vocab", "dim"))], spec)
        for _ in range(50):
            weight.grad = torch.ones(PART.shape)
            step_scaled(optimizer, FINITE, 1.0, 0.0)
        moved[rounding] = 1 - weight.detach().float().mean().item()
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(50 * 1e-4, rel=0.1)


def test_a_step_that_is_not_finite_changes_nothing():
    for name in OPTIMIZERS:
        weight = narrow_weight(torch.randn(PART.shape))
        before = weight.detach().clone()
        optimizer = build_optimizer([weight], [PART], spec_of(name, "stochastic"))
        weight.grad = torch.full(PART.shape, torch.nan)
        step_scaled(optimizer, torch.tensor(torch.nan, dtype=torch.float64), 1.0, 1.0)
        assert torch.equal(weight, before)
        assert optimizer.state[weight]["step"] == 0


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("train.precision=fp32",), "requires train.precision = bf16"),
        (("train.precision=fp16",), "requires train.precision = bf16"),
        (("train.precision=bf16", "lora.rank=2"), "adapters are few"),
        (("train.precision=bf16", "train.fp8=true"), "gathers no float8"),
    ],
)
def test_what_cannot_do_without_masters_is_refused(words, rule):
    base = ("train.master=none", "cluster.device=cpu", "cluster.devices_per_node=1")
    config = load_config(None, [*base, *words])
    with pytest.raises(ConfigError, match=rule):
        resolve_layout(config, detect(config.cluster, {}))


ADAMW = spec_of("adamw", "stochastic")
CASES = [
    ("mb2", "llama", ADAMW, {}),
    ("shard2 zero3 mb2", "llama", spec_of("adamw", "stochastic", state_dtype="bf16"), {}),
    *(
        pytest.param(label, model, spec, fields, marks=pytest.mark.slow)
        for label, model, spec, fields in [
            ("dp2 mb2", "llama", spec_of("adamw", "nearest"), {}),
            ("shard2 zero1 mb2", "llama", ADAMW, {}),
            ("shard2 zero2 mb1", "llama", spec_of("muon", "stochastic"), {}),
            ("tp2 sp mb2", "biased", spec_of("lion", "stochastic"), {}),
            ("tp2 mb2", "qwen2_moe", ADAMW, {}),
            ("shard2 zero2 ep2 mb2", "qwen2_moe", spec_of("muon", "nearest"), {}),
            ("cp2-ring mb2", "llama", spec_of("sgd", "stochastic", momentum=0.5), {}),
            ("pp2 1f1b mb1", "tied", ADAMW, {}),
            ("pp2 1f1b mb1", "llama", spec_of("lion", "nearest"), {}),
            ("shard2 zero1 mb1 offload-optimizer", "llama", ADAMW, {}),
            ("shard2 zero1 mb1", "llama", spec_of("muon", "stochastic"), {"fsdp2": True}),
            ("shard2 zero2 mb1", "llama", spec_of("lion", "nearest"), {"fsdp2": True}),
            ("shard2 zero3 mb1", "llama", ADAMW, {"fsdp2": True}),
            ("shard2 zero3 mb2", "llama", ADAMW, {"fsdp2": True, "same": True}),
            ("shard2 zero3 mb2", "llama", spec_of("adamw", "nearest"), {"same": True}),
        ]
    ),
]


def proven(world, case):
    return Suite(world).prove(case)


@pytest.mark.often(1)
@pytest.mark.parametrize(("label", "model", "spec", "fields"), CASES, ids=str)
def test_layouts_update_as_one_device_does(label, model, spec, fields):
    case = make(label, model)
    fields = dict(fields)
    update = {"precision": "bf16", "master": "none"}
    update |= {"reduce_dtype": "same"} if fields.pop("same", False) else {}
    train = case.train.model_copy(update=update)
    case = replace(case, train=train, optimizer=spec, **fields)
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []
        assert "weights in bf16, without masters" in {verdict.claim for verdict in verdicts}


@pytest.mark.often(1)
@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("label", ["shard2 zero3 mb1", "tp2 sp mb1", "pp2 1f1b mb1"])
def test_a_step_is_read_bit_for_bit_by_any_layout(label, name, tmp_path):
    spec = spec_of(name, "stochastic")
    rounded = {"rtol": 0.25, "atol": 0.03}  # of what is rounded to the other side, and after it
    others = ("mb1", "shard2 zero2 mb1")
    saved = check_read_by(others, label, spec, str(tmp_path), train=PURE, **rounded)
    weights = [array for key, array in saved.items() if key.startswith("weight.")]
    assert weights
    assert all(is_in_bf16(array) for array in weights)
    files = sum(file.stat().st_size for file in tmp_path.glob("*/weights-*.safetensors"))
    numbers = sum(part.numel for part in parts(saved_steps.MODEL))
    assert 2 * numbers <= files < 3 * numbers  # with the names of tensors


def test_a_step_is_read_with_masters_too(tmp_path):
    spec = spec_of("lion", "nearest")
    (written,) = on_ranks(1, write, label="mb1", spec=spec, root=str(tmp_path), train=PURE)
    wide = PURE.model_copy(update={"master": "fp32"})
    (resumed,) = on_ranks(1, go_on, label="mb1", spec=spec, root=str(tmp_path), train=wide)
    assert all(np.array_equal(resumed[0][name], written[0][name]) for name in written[0])
    weights = [name for name in resumed[1] if name.startswith("weight.")]
    assert not all(is_in_bf16(resumed[1][name]) for name in weights)
    # A run that counts updates for its rounding begins to count there.
    counting = spec_of("lion", "stochastic")
    on_ranks(1, go_on, label="mb1", spec=counting, root=str(tmp_path), train=PURE)


def is_in_bf16(array):
    """Whether all numbers are those of bf16."""
    return not (np.ascontiguousarray(array, np.float32).view(np.uint32) & 0xFFFF).any()


MODEL = model_spec(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=300)
MEMORY = [
    "mb1",
    "dp2 mb1",
    "shard2 zero1 mb1",
    "shard2 zero2 mb1",
    "shard2 zero3 mb1",
    "shard4 zero3 mb1",
    "tp2 sp mb1",
    "pp2 1f1b mb1",
    "dp2 shard2 zero2 mb1",
    "shard2 zero2 mb1 offload-optimizer",
]


@pytest.mark.slow
@pytest.mark.parametrize("train", [PURE, SAME], ids=lambda train: train.reduce_dtype)
@pytest.mark.parametrize("label", MEMORY)
def test_memory_by_category_is_that_of_a_dry_run(label, train):
    layout = Layout.parse(label)
    train = train.model_copy(update={"batch": 2 * layout.dp})
    spec = spec_of("adamw", "stochastic", state_dtype="bf16")
    program, is_offloaded = lower(MODEL, train, spec, layout), layout.offload != "none"
    for rank in (0, layout.world - 1):
        walk, run = timeline(program, rank), dry_run(program, rank)
        last = run.phases[-1].end
        for category in ("weights", "optimizer"):
            assert walk.moments[-1].held.get(category, 0) == last.get(category, 0)
        most = max(sum(moment.held.values()) for moment in walk.moments)
        # An offloaded update's copies are in the host's memory: a dry run has one memory for both.
        on_device = [phase for phase in run.phases if phase.name != "update" or not is_offloaded]
        assert max(phase.total for phase in on_device) == pytest.approx(most, rel=0.05)
        assert run.messages == run.expected


def test_weights_take_half_and_so_do_saved_steps():
    count = sum(part.numel for part in parts(MODEL))
    spec = OptimizerSpec(state_dtype="bf16")
    wide = PURE.model_copy(update={"master": "fp32"})
    held = []
    for train in (wide, PURE):
        last = timeline(lower(MODEL, train, spec, Layout()), 0).moments[-1].held
        held.append(last["weights"] + last.get("gathered", 0))
    assert held == [6 * count, 2 * count]
    saved = [saved_bytes(MODEL, train, spec) for train in (wide, PURE)]
    assert saved == [8 * count, 6 * count]


def dtypes_of(world, train, layout):
    """The dtypes of the weights that this rank trains."""
    program = lower(MODEL, train, OptimizerSpec(), layout)
    parallel = build(program, open_groups(layout, world), world.device, seeded(MODEL, 0))
    leaves = Shards(parallel.trained, on_host=False).leaves
    return {leaf.dtype for leaf in leaves}


def test_no_rank_keeps_weights_in_fp32():
    for label in ("mb1", "shard2 zero1 mb1", "shard2 zero3 mb1"):
        layout = Layout.parse(label)
        for dtypes in on_ranks(layout.world, dtypes_of, train=PURE, layout=layout):
            assert dtypes == {torch.bfloat16}
