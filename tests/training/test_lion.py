"""Lion: its paper's algorithm on whole weights, and the same on shards."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from conformance_cases import make
from meshwright.prove.suite import Suite
from meshwright.runtime.checks.notes import check_room
from meshwright.spec.loading import load_config
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.parts import Part
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizer import build_optimizer, step_scaled
from ranks import on_ranks

MATRIX = Part("m", (8, 4), ("ffn", "dim"))
NORM = Part("n", (4,), ("dim",))
FINITE = torch.tensor(1.0, dtype=torch.float64)


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(part.shape)) for part in (MATRIX, NORM)]


def test_an_update_is_that_of_the_paper():
    """arXiv:2302.06675, algorithm 2, in fp64; only matrices decay."""
    spec = OptimizerSpec(name="lion", lr=0.02, weight_decay=0.3)
    assert spec.betas == (0.9, 0.99)  # the paper's defaults
    ours = weights()
    theirs = [weight.detach().double() for weight in ours]
    momenta = [torch.zeros_like(weight) for weight in theirs]
    optimizer = build_optimizer(ours, [MATRIX, NORM], spec)
    for _ in range(5):
        for at, (weight, decay) in enumerate(zip(ours, (0.3, 0.0), strict=True)):
            gradient = torch.randn_like(weight)
            weight.grad = 2 * gradient
            direction = (0.9 * momenta[at] + 0.1 * gradient.double()).sign()
            theirs[at] = theirs[at] - 0.02 * (direction + decay * theirs[at])
            momenta[at] = 0.99 * momenta[at] + 0.01 * gradient.double()
        step_scaled(optimizer, FINITE, 2.0, 0.0)
    for weight, exact, momentum in zip(ours, theirs, momenta, strict=True):
        torch.testing.assert_close(weight.detach().double(), exact, rtol=1e-5, atol=1e-6)
        state = optimizer.state[weight]["exp_avg"].double()
        torch.testing.assert_close(state, momentum, rtol=1e-5, atol=1e-7)


def test_a_step_that_is_not_finite_changes_nothing():
    weight = weights()[0]
    optimizer = build_optimizer([weight], [MATRIX], OptimizerSpec(name="lion"))
    weight.grad = torch.randn_like(weight)
    step_scaled(optimizer, FINITE, 1.0, 1.0)
    before, kept = weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()
    weight.grad = torch.full_like(weight, torch.inf)
    step_scaled(optimizer, torch.tensor(torch.inf, dtype=torch.float64), 1.0, 1.0)
    assert torch.equal(weight, before)
    assert torch.equal(optimizer.state[weight]["exp_avg"], kept)


SPEC = OptimizerSpec(name="lion", warmup_steps=2)
FAST = [("shard2 zero3 mb2", "llama"), ("tp2 sp mb2", "biased"), ("pp2 1f1b mb1", "tied")]
SLOW = [
    ("dp2 mb2", "olmo2"),
    ("zero2 cp2-ulysses mb2", "qwen3"),
    ("shard2 zero1 mb1 offload-optimizer", "tied"),
    ("shard2 zero2 ep2 mb2", "qwen2_moe"),
    ("shard2 zero3 tp2 sp mb2", "neox"),
    ("shard2 zero1 mb1", "llama", "bf16"),
]


def lion(label, model, *more, **fields):
    return replace(make(label, model, *more), optimizer=SPEC, **fields)


PROVEN = [
    *(lion(*case) for case in FAST),
    *(pytest.param(lion(*case), marks=pytest.mark.slow) for case in SLOW),
    pytest.param(lion("shard2 zero3 mb2", "llama", fsdp2=True), marks=pytest.mark.slow),
]


def proven(world, case):
    return Suite(world).prove(case)


@pytest.mark.often(1)
@pytest.mark.parametrize("case", PROVEN, ids=lambda case: case.label)
def test_layouts_update_as_one_device_does(case):
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_disk_is_asked_for_the_states_of_any_optimizer(name, tmp_path: Path):
    config = load_config(overrides=[f"optimizer.name={name}"])
    assert "3 steps of" in check_room(config, tmp_path)
