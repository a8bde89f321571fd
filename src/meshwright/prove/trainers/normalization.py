"""Finds how a run's loss weights its targets, from the gradient of the logits.

The gradient of a cross-entropy is weight x (softmax - one-hot) at each target, so it shows the
weight, whatever code computed the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

# A gradient is that of a cross-entropy if so much of it at most is something else.
_REST: Final = 1e-3
_NEAR: Final = 1e-3


@dataclass(frozen=True)
class TargetWeights:
    """The number of targets in a microbatch, with the smallest, the largest and the sum of their
    weights in the loss.

    `targets` is 0 if the loss is not a cross-entropy of the model's first output.
    """

    data_rank: int
    microbatch: int
    targets: int = 0
    least: float = 0.0
    most: float = 0.0
    total: float = 0.0


def target_weights(logits: Tensor, data_rank: int, microbatch: int) -> TargetWeights:
    """Return the weights of a microbatch's targets in the loss; `logits` `[..., vocab]` have
    received their gradient.
    """
    gradient = logits.grad
    unknown = TargetWeights(data_rank, microbatch)
    if gradient is None or logits.dim() < 2 or logits.shape[-1] < 2:
        return unknown
    flat, softmax = gradient.flatten(0, -2), logits.detach().softmax(-1).flatten(0, -2)
    target = flat.argmin(-1, keepdim=True)
    weight = -flat.gather(-1, target) / (1 - softmax.gather(-1, target)).clamp(min=1e-12)
    one_hot = torch.zeros_like(flat).scatter_(-1, target, 1.0)
    residual = (flat - weight * (softmax - one_hot)).norm() / flat.norm().clamp(min=1e-300)
    if not float(residual) <= _REST:
        return unknown
    used = weight[weight > 0]
    if not used.numel():
        return unknown
    bounds = float(used.min()), float(used.max())
    return TargetWeights(data_rank, microbatch, used.numel(), *bounds, float(used.sum()))


def convention_text(weights: Sequence[TargetWeights], scale: float) -> str:
    """Describe in a sentence which mean over the targets a step's loss is.

    The sum over data ranks is multiplied by `scale`.
    """
    if not weights or not all(part.targets for part in weights):
        return (
            "the loss is not a plain cross-entropy of the model's output: its mean is not examined"
        )
    total = sum(part.total for part in weights) * scale
    count = sum(part.targets for part in weights)
    smallest, largest = min(part.least for part in weights), max(part.most for part in weights)
    if largest <= smallest * (1 + _NEAR):
        text = f"each of the {count} targets of a step has the same weight"
    elif all(part.most <= part.least * (1 + _NEAR) for part in weights):
        text = (
            "the loss is a mean of microbatches' means: with unequal numbers of targets "
            f"({min(part.targets for part in weights)} to "
            f"{max(part.targets for part in weights)}), "
            f"a target weighs up to {largest / smallest:.3g} times as much as another"
        )
    else:
        text = "targets of a microbatch have different weights"
    if abs(total - 1) > _NEAR:
        text += f"; the weights add up to {total:.4g}, not to 1 as those of a mean do"
    return text
