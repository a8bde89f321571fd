"""Finds the clipping that a script does by its own code, from the gradients that it leaves.

Gradients are read before torch's functions clip. What clips by other code has done so before they
are read: then most of them are one multiple of the reference, below 1, that ends at the same norm
in every step.
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
    """The norm that a script clips to, and what it multiplied each step's gradients by."""

    max_norm: float
    factors: tuple[float, ...]

    @property
    def text(self) -> str:
        """A note about it."""
        return (
            f"the gradients are clipped to a norm of {self.max_norm:.4g} before they are read, by "
            "the script's own code: the norm is not compared"
        )

    def undone(self, observed: Sequence[ObservedStep]) -> list[ObservedStep]:
        """Return steps with the gradients as they were before clipping."""
        return [
            step._replace(gradients={n: _scaled(g, 1 / f) for n, g in step.gradients.items()})
            for step, f in zip(observed, self.factors, strict=True)
        ]


def own_clip(
    observed: Sequence[ObservedStep], replayed: Sequence[ReplayedStep], scale: float
) -> OwnClip | None:
    """Return the clipping that the gradients show, None if it is not sure.

    Two steps at least must agree: that end at the same norm, or of which one ends at it and the
    others are below it.
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
    """Return the multiple of the reference that most gradients of a step are."""
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
    """Return the multiple of a reference that a value is, nothing if it is none."""
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
