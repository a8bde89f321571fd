"""Detects gradient clipping by a script's own code, from the gradients that it leaves.

Gradients are read before torch's functions clip. Other code has clipped already by then: most
gradients are then one common multiple of the reference, below 1, and have the same norm in every
step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from torch import Tensor

from meshwright.prove.trainers.observed import GatheredTensor, ObservedStep, RankCopy, ReplayedStep

_SAME: Final = 1e-2  # ratios of parameters, and norms of steps, that are equal
_LEFT: Final = 0.05  # what a multiple of the reference may leave of a gradient
_CLIPS: Final = 1 - 1e-3  # a ratio below it is clipped


class OwnClip(NamedTuple):
    """The norm to which a script clips, and the factor by which it multiplied each step's
    gradients.
    """

    max_norm: float
    factors: tuple[float, ...]

    @property
    def text(self) -> str:
        """A sentence about it for the notes of a verdict."""
        return (
            f"the gradients are clipped to a norm of {self.max_norm:.4g} before they are read, by "
            "the script's own code: the norm is not compared"
        )

    def undone(self, observed: Sequence[ObservedStep]) -> list[ObservedStep]:
        """Return the steps with their gradients as they were before clipping."""
        return [
            step._replace(gradients={n: _scaled(g, 1 / f) for n, g in step.gradients.items()})
            for step, f in zip(observed, self.factors, strict=True)
        ]


def own_clip(
    observed: Sequence[ObservedStep], replayed: Sequence[ReplayedStep], scale: float
) -> OwnClip | None:
    """Return the clipping that the gradients show; None if there is none, or if it is uncertain.

    At least two steps must agree: both have the same norm, or one has it and the others are below.
    `scale` times the contributions' sum is the right gradient.
    """
    if len(observed) < 2 or any(step.norms for step in observed):
        return None
    factors, norms = list[float](), list[float]()
    for seen, exact in zip(observed, replayed, strict=True):
        factor = _common_ratio(seen, exact, scale)
        if factor is None:
            return None
        names = exact.contributions[0].gradients
        squares = [(exact.summed(name) * scale).square().sum().item() for name in names]
        factors.append(factor if factor < _CLIPS else 1.0)
        norms.append(factors[-1] * math.sqrt(sum(squares)))
    if max(factors) - min(factors) <= 1e-3 * max(factors):
        return None  # the same factor in every step is a wrong divisor
    clipped = [norm for norm, factor in zip(norms, factors, strict=True) if factor < 1]
    if max(norms) > max(clipped) * (1 + _SAME) or min(clipped) < max(clipped) * (1 - _SAME):
        return None
    return OwnClip(median(clipped), tuple(factors))


def _common_ratio(seen: ObservedStep, exact: ReplayedStep, scale: float) -> float | None:
    """Return the multiple of the reference that most gradients of a step are; None without one up
    to 1.
    """
    ratios = []
    for name, gathered in seen.gradients.items():
        value = gathered.copies[0].value
        if value is None or name not in exact.contributions[0].gradients:
            continue
        reference = exact.summed(name) * scale
        if value.shape == reference.shape and value.isfinite().all():
            ratios += _fitted(value.double(), reference)
    if not ratios:
        return None
    middle = median(ratios)
    near = sum(abs(ratio - middle) <= _SAME * abs(middle) for ratio in ratios)
    is_common = middle > 0 and 2 * near > len(seen.gradients)
    return min(middle, 1.0) if is_common and middle < 1 + _SAME else None


def _fitted(value: Tensor, reference: Tensor) -> list[float]:
    """Return, in a list, which multiple of a reference a value is; empty if it is none."""
    square = reference.square().sum().item()
    if not square:
        return []
    ratio = (value * reference).sum().item() / square
    residual = (value - ratio * reference).norm().item()
    return [ratio] if residual <= _LEFT * value.norm().item() else []


def _scaled(gathered: GatheredTensor, factor: float) -> GatheredTensor:
    copies = tuple(
        RankCopy(ranks, None if value is None else value.double() * factor)
        for ranks, value in gathered.copies
    )
    return gathered._replace(copies=copies)
