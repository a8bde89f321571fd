"""Detects programs that add up losses, and divide the gradients by a number of targets after the
backward.

The outputs' recorded gradients are then those of a sum, and all parameters' gradients a common
fraction of what they give. Divided by that number, the replay is the mean that was meant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from meshwright.prove.trainers.faults import factor_of
from meshwright.prove.trainers.normalization import TargetWeights
from meshwright.prove.trainers.observed import MeshAxis, ObservedStep, ReplayedStep
from meshwright.prove.trainers.own_clip import own_clip

# A sum of weights within this of 1 is that of a mean; a ratio within this of its inverse divides.
_NEAR: Final = 1e-3
# A number of targets is a whole one, up to rounding.
_WHOLE: Final = 1e-4


def divisors(
    observed: Sequence[ObservedStep],
    replayed: Sequence[ReplayedStep],
    weighting: Sequence[TargetWeights],
    axes: Sequence[MeshAxis],
) -> list[float] | None:
    """Return the number of targets by which each step's gradients are to be divided after the
    backward; None if the recorded gradients of the outputs are all there is to it.

    If the loss is a cross-entropy, it is the sum of its targets' weights, provided that the
    gradients are nearer to a mean than to that sum. Of another loss, it is what all gradients show,
    if that is a whole number and no product of axis sizes.
    """
    ratios = [_middle_ratio(*pair) for pair in zip(observed, replayed, strict=True)]
    if not all(ratios) or not weighting:
        return None
    if not all(part.targets for part in weighting):
        return _whole_numbers(ratios, replayed[0], axes)
    totals = _totals(replayed, weighting)
    pairs = list(zip(ratios, totals, strict=True))
    data_ranks = len({part.data_rank for part in replayed[0].contributions})
    # A loss times the number of data ranks is one whose gradients are averaged over them.
    are_means = any(abs(total / k - 1) <= _NEAR for total in totals for k in (1, data_ranks))
    if are_means or any(ratio * total == 0 for ratio, total in pairs):
        return None
    if all(abs(ratio * total - 1) <= _NEAR for ratio, total in pairs):
        return totals
    if any(own_clip(observed, replayed, s) is not None for s in (1 / data_ranks, 1.0)):
        return None
    is_nearer = all(abs(math.log(r * t)) < abs(math.log(r)) / 2 for r, t in pairs)
    return totals if is_nearer else None


def divided(step: ReplayedStep, divisor: float) -> ReplayedStep:
    """Return a replayed step whose gradients are divided."""
    return step._replace(
        contributions=[
            part._replace(gradients={n: g / divisor for n, g in part.gradients.items()})
            for part in step.contributions
        ],
        rounded=[{n: g / divisor for n, g in sample.items()} for sample in step.rounded],
    )


def divided_weights(weights: TargetWeights, divisor: float) -> TargetWeights:
    """Return the weights of targets in a loss that is divided."""
    return TargetWeights(
        weights.data_rank, weights.microbatch, weights.targets, weights.least / divisor,
        weights.most / divisor, weights.total / divisor,
    )  # fmt: skip


def _totals(replayed: Sequence[ReplayedStep], weighting: Sequence[TargetWeights]) -> list[float]:
    """Return the sum of the targets' weights of each step."""
    totals, first = list[float](), 0
    for step in replayed:
        last = first + len(step.contributions)
        totals.append(sum(part.total for part in weighting[first:last]))
        first = last
    return totals


def _whole_numbers(
    ratios: Sequence[float], first: ReplayedStep, axes: Sequence[MeshAxis]
) -> list[float] | None:
    """Return the whole numbers whose inverses the ratios are, unless they are sizes of axes."""
    numbers = [round(1 / ratio) for ratio in ratios]
    are_whole = all(
        n > 1 and abs(ratio * n - 1) <= _WHOLE for n, ratio in zip(numbers, ratios, strict=True)
    )
    data_ranks = len({part.data_rank for part in first.contributions})
    microbatches = len({part.microbatch for part in first.contributions})
    is_size = any(
        factor_of(ratio * k, axes, microbatches)[0] or abs(ratio * k - 1) <= _NEAR
        for ratio in ratios
        for k in (1, data_ranks)
    )
    return None if is_size or not are_whole else [float(n) for n in numbers]


def _middle_ratio(seen: ObservedStep, exact: ReplayedStep) -> float:
    """Return the median over parameters of how many times the contributions' sum a gradient is;
    0 if most gradients point elsewhere.
    """
    ratios = []
    for name, gathered in seen.gradients.items():
        value = gathered.copies[0].value
        if value is None or name not in exact.contributions[0].gradients:
            continue
        total = exact.summed(name)
        square = total.square().sum().item()
        if value.shape == total.shape and square and value.isfinite().all():
            ratios.append((value.double() * total).sum().item() / square)
    middle = median(ratios) if ratios else 0.0
    return middle if middle > 0 else 0.0
