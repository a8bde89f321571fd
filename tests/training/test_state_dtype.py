"""AdamW with moments in bf16: its update, its files, and the same on shards."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from conformance_cases import make
from meshwright.errors import ConfigError
from meshwright.parallel.data_parallel.matrices import ShardPlace
from meshwright.prove.suite import Suite
from meshwright.runtime.certificate import read_whole
from meshwright.spec.loading import load_config
from meshwright.spec.optimizers import base
from meshwright.spec.parts import Part
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizer import build_optimizer, step_scaled
from meshwright.training.optimizers.rounding import round_by_place
from ranks import on_ranks
from saved_steps import check_read_by, go_on, write

PART = Part("m", (8, 4), ("ffn", "dim"))
FINITE = torch.tensor(1.0, dtype=torch.float64)
SPEC = OptimizerSpec(state_dtype="bf16", lr=0.02, weight_decay=0.3, warmup_steps=2)


@pytest.fixture(params=[2**22, 8])
def pieces(request, monkeypatch):
    """Updates take the whole weight at once, or two rows."""
    monkeypatch.setattr(base, "_PIECE", request.param)


def test_an_update_is_adamw_s_with_rounded_moments(pieces):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(PART.shape))
    exact = weight.detach().double()
    mean, square = torch.zeros_like(exact), torch.zeros_like(exact)
    optimizer = build_optimizer([weight], [PART], SPEC)
    (beta1, beta2), rate = SPEC.betas, SPEC.lr
    for number in range(1, 6):
        gradient = torch.randn_like(weight)
        weight.grad = 4 * gradient
        mean = beta1 * mean + (1 - beta1) * gradient.double()
        square = beta2 * square + (1 - beta2) * gradient.double() ** 2
        size = (square / (1 - beta2**number)).sqrt() + SPEC.eps
        exact = exact * (1 - rate * 0.3) - rate * mean / (1 - beta1**number) / size
        mean, square = mean.bfloat16().double(), square.bfloat16().double()
        step_scaled(optimizer, FINITE, 4.0, 0.0)
    torch.testing.assert_close(weight.detach().double(), exact, rtol=1e-5, atol=1e-6)
    state = optimizer.state[weight]
    assert (state["exp_avg"].dtype, state["step"].item()) == (torch.bfloat16, 5)
    torch.testing.assert_close(state["exp_avg"].double(), mean, rtol=2**-7, atol=1e-8)


def test_a_step_that_is_not_finite_changes_nothing_even_the_first():
    weight = nn.Parameter(torch.randn(PART.shape))
    before = weight.detach().clone()
    optimizer = build_optimizer([weight], [PART], SPEC)
    weight.grad = torch.full_like(weight, torch.nan)
    step_scaled(optimizer, torch.tensor(torch.nan, dtype=torch.float64), 1.0, 1.0)
    assert torch.equal(weight, before)
    assert not optimizer.state[weight]["exp_avg"].any()
    assert optimizer.state[weight]["step"] == 0


def test_a_number_between_two_is_rounded_to_each_in_proportion():
    place = ShardPlace("m", (300, 400), (0, 0))
    spread = {}
    for step in (1, 2):
        wide = torch.full(place.shape, 1 + 2**-7 / 4)
        spread[step] = round_by_place(wide, place, "exp_avg", torch.tensor(float(step)))
        assert set(wide.unique().tolist()) == {1.0, 1 + 2**-7}
        ups = wide > 1
        assert ups.double().mean().item() == pytest.approx(0.25, abs=0.005)
        assert ups.double().mean(0).std().item() < 0.04  # no column, no row goes one way
        assert ups.double().mean(1).std().item() < 0.04
    both = ((spread[1] > 1) & (spread[2] > 1)).double().mean().item()
    assert both == pytest.approx(0.25**2, abs=0.005)
    negative = round_by_place(-torch.full((300, 400), 1 + 2**-9), place, "exp_avg", FINITE)
    assert negative.mean().item() == pytest.approx(-1 - 2**-9, abs=1e-4)
    exact = torch.randn(300, 400).bfloat16().float()
    assert torch.equal(round_by_place(exact.clone(), place, "exp_avg", FINITE), exact)


def test_a_shard_is_rounded_as_it_is_in_the_whole():
    wide = torch.randn(6, 8, 10)
    whole = round_by_place(wide.clone(), ShardPlace("m", (6, 8, 10), (0, 0, 0)), "exp_avg", FINITE)
    shard = wide[2:5, 4:, 3:7].clone()
    round_by_place(shard, ShardPlace("m", (6, 8, 10), (2, 4, 3)), "exp_avg", FINITE)
    assert torch.equal(shard, whole[2:5, 4:, 3:7])


def test_a_second_moment_falls_with_stochastic_rounding_alone():
    """With `betas[1]` of 0.999, half a step of bf16 is more than what a step takes away."""
    ends = {}
    for rounding in ("nearest", "stochastic"):
        spec = OptimizerSpec(state_dtype="bf16", rounding=rounding, betas=(0.9, 0.999))
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = build_optimizer([weight], [PART], spec)
        for step in range(500):
            weight.grad = torch.full_like(weight, float(step == 0))
            step_scaled(optimizer, FINITE, 1.0, 0.0)
        ends[rounding] = optimizer.state[weight]["exp_avg_sq"].float().mean().item()
    assert ends["nearest"] == torch.tensor(0.001).bfloat16().item()
    assert ends["stochastic"] == pytest.approx(0.001 * 0.999**499, rel=0.01)


def test_other_optimizers_refuse_it():
    with pytest.raises(ConfigError, match="the states of sgd are fp32"):
        load_config(None, ["optimizer.name=sgd", "optimizer.state_dtype=bf16"])
    with pytest.raises(ConfigError, match="states in fp32 are not rounded"):
        load_config(None, ["optimizer.rounding=stochastic"])


STOCHASTIC = SPEC.model_copy(update={"rounding": "stochastic"})
CASES = [
    ("shard2 zero3 mb2", "llama", {}),
    ("tp2 sp mb2", "biased", {}),
    ("shard2 zero1 mb2", "llama", {"optimizer": STOCHASTIC}),
    ("tp2 mb2", "qwen2_moe", {"optimizer": STOCHASTIC}),
    pytest.param(
        "shard2 zero2 ep2 mb2", "qwen2_moe", {"optimizer": STOCHASTIC}, marks=pytest.mark.slow
    ),
    pytest.param("pp2 1f1b mb1", "tied", {"optimizer": STOCHASTIC}, marks=pytest.mark.slow),
    pytest.param(
        "shard2 zero1 mb1 offload-optimizer",
        "llama",
        {"optimizer": STOCHASTIC},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "shard2 zero3 mb2",
        "llama",
        {"fsdp2": True, "optimizer": STOCHASTIC},
        marks=pytest.mark.slow,
    ),
    pytest.param("shard2 zero2 ep2 mb2", "qwen2_moe", {}, marks=pytest.mark.slow),
    pytest.param("pp2 1f1b mb1", "tied", {}, marks=pytest.mark.slow),
    pytest.param("shard2 zero1 mb1 offload-optimizer", "llama", {}, marks=pytest.mark.slow),
    pytest.param("shard2 zero3 mb2", "llama", {"fsdp2": True}, marks=pytest.mark.slow),
]


def proven(world, case):
    return Suite(world).prove(case)


@pytest.mark.often(1)
@pytest.mark.parametrize(("label", "model", "fields"), CASES, ids=str)
def test_layouts_update_as_one_device_does(label, model, fields):
    case = replace(make(label, model), **{"optimizer": SPEC, **fields})
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, STOCHASTIC], ids=lambda spec: spec.rounding)
@pytest.mark.parametrize(
    "label",
    ["shard2 zero3 mb1", "tp2 sp mb1", "pp2 1f1b mb1", "shard2 zero1 mb1 offload-optimizer"],
)
def test_a_step_is_read_bit_for_bit_by_any_layout(label, spec, tmp_path):
    others = ("mb1", "shard2 zero2 mb1")
    check_read_by(others, label, spec, str(tmp_path), rtol=2**-7, atol=1e-4)


def test_a_step_is_read_in_either_dtype(tmp_path):
    (written,) = on_ranks(1, write, label="mb1", spec=SPEC, root=str(tmp_path))
    wide = SPEC.model_copy(update={"state_dtype": "fp32"})
    (resumed,) = on_ranks(1, go_on, label="mb1", spec=wide, root=str(tmp_path))
    assert all(np.array_equal(resumed[0][name], written[0][name]) for name in written[0])
    moments = [name for name in resumed[1] if name.startswith("exp_avg")]
    assert len(moments) == 2 * len(resumed[1]) // 3
    kept_wide = [name for name in moments if is_rounded(written[1][name])]
    assert kept_wide == moments
    assert not any(is_rounded(resumed[1][name]) for name in moments)
    (file, *_) = sorted(tmp_path.glob("*/optimizer-*.safetensors"))
    arrays = read_whole(file.parent, "optimizer")
    assert all(np.array_equal(arrays[name], written[0][name]) for name in moments)


def is_rounded(array):
    """Whether all numbers are those of bf16."""
    return not (np.ascontiguousarray(array, np.float32).view(np.uint32) & 0xFFFF).any()
