"""The optimizer with its parameter groups, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from meshwright.spec.training import OptimizerSpec


def build_optimizer(
    parameters: Sequence[nn.Parameter], spec: OptimizerSpec
) -> torch.optim.Optimizer:
    """Return AdamW or SGD over parameters or shards of them.

    Weight decay is decoupled (arXiv:1711.05101) and applies to matrices only: biases and norm
    gains are not decayed.
    """
    decayed = [parameter for parameter in parameters if parameter.dim() >= 2]
    rest = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": spec.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if spec.name == "sgd":
        return _DecoupledSGD(groups, lr=spec.lr, momentum=spec.momentum)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)


class _DecoupledSGD(torch.optim.SGD):
    """SGD whose decay shrinks the weights beside the update, as AdamW's does."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            if decay:
                torch._foreach_mul_(group["params"], 1 - group["lr"] * decay)
            group["weight_decay"] = 0.0  # torch's own would couple it to the gradient
        super().step()
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay


def learning_rate(step: int, steps: int, spec: OptimizerSpec) -> float:
    """Return the learning rate of a step (from 0): linear warm-up, then the schedule."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    low = spec.min_lr_ratio
    left = max(1, steps - spec.warmup_steps)
    progress = min(1.0, (step - spec.warmup_steps) / left)
    if spec.schedule == "cosine":
        return spec.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))
    if spec.schedule == "linear":
        return spec.lr * (1 - (1 - low) * progress)
    if spec.schedule == "wsd":
        decay = spec.decay_steps if spec.decay_steps is not None else max(1, steps // 5)
        into = max(0, step - (steps - decay))
        return spec.lr * (1 - (1 - low) * min(1.0, into / decay))
    return spec.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
