"""Muon: torch's own on whole matrices, and the same on shards."""

import pytest
import torch
from torch import nn

from meshwright.spec.parts import Part
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizer import build_optimizer, step_scaled

SHAPES = [(24, 16), (16, 24), (16, 16), (3, 40)]


def matrices(seed: int) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def stepped(optimizer, weights, steps: int, update) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        update(optimizer)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_whole_matrices_are_updated_as_torch_does(scale, nesterov):
    ours, theirs = matrices(0), matrices(0)
    spec = OptimizerSpec(
        name="muon", lr=0.02, momentum=0.9, nesterov=nesterov, scale=scale, weight_decay=0.1
    )
    parts = [Part(f"m{at}", shape, ("ffn", "dim")) for at, shape in enumerate(SHAPES)]
    norm = torch.tensor(1.0, dtype=torch.float64)
    stepped(
        build_optimizer(ours, parts, spec), ours, 4, lambda one: step_scaled(one, norm, 1.0, 0.0)
    )
    oracle = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scale, weight_decay=0.1
    )
    stepped(oracle, theirs, 4, lambda one: one.step())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
