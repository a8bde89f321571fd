"""Compares the learning rate of every step of a run with its definition in the docs. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from meshwright.prove.verdict import Verdict
from meshwright.spec.learning_rate import learning_rate
from meshwright.spec.training import OptimizerSpec

# Of a longer run, steps are compared where a schedule turns, and so many others, evenly spaced.
_COMPARED: Final = 4096
# Two formulas of the same rate round differently.
_TOLERANCE: Final = 1e-9


def rate_of(number: int, steps: int, spec: OptimizerSpec) -> float:
    """Return the learning rate of step `number` (from 1) of `steps`, as `docs/config.md` defines
    it.

    The rate rises linearly over the warm-up steps. Then it falls along a cosine or a line to
    `min_lr_ratio` of its maximum at the last step (or `schedule_steps`). With "wsd", it stays at
    the maximum and falls over the last `decay_steps`, by default a fifth of all steps.
    arXiv:1608.03983, equation 5; arXiv:2404.06395.
    """
    if number <= spec.warmup_steps:
        return spec.lr * number / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    last = spec.schedule_steps if spec.schedule_steps else steps
    if number >= last:
        return spec.lr * spec.min_lr_ratio
    falls = last - spec.warmup_steps
    if spec.schedule == "wsd":
        falls = spec.decay_steps if spec.decay_steps else max(last // 5, 1)
    share = min((last - number) / falls, 1.0)  # of the fall that is still ahead
    if spec.schedule == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * share)


def prove_rates(steps: int, spec: OptimizerSpec) -> Verdict:
    """Compare the learning rates of a run of `steps` steps with `rate_of`, and return the
    verdict.
    """
    compared = _compared(steps, spec)
    for number in compared:
        actual, rate = learning_rate(number, steps, spec), rate_of(number, steps, spec)
        if abs(actual - rate) > _TOLERANCE * spec.lr:
            break
    else:
        return _verdict(steps, f"{spec.schedule}: those of {len(compared)} steps agree")
    return _verdict(steps, f"step {number} has {actual:.6g} instead of {rate:.6g}", passed=False)


def _verdict(steps: int, observed: str, *, passed: bool = True) -> Verdict:
    claim, expected = f"learning rates of all {steps} steps", "those of the schedule's formula"
    return Verdict(claim, {}, expected, observed, None, passed)


def _compared(steps: int, spec: OptimizerSpec) -> list[int]:
    """Return the step numbers to compare, from 1: all of a short run; of a long one, those near the
    schedule's turning points and others evenly spaced.
    """
    last = spec.schedule_steps or steps
    falls = spec.decay_steps or max(last // 5, 1)
    turns = (1, spec.warmup_steps, last - falls, last, steps)
    near: Iterable[int] = (turn + off for turn in turns for off in range(-3, 4))
    spaced = range(1, steps + 1, max(steps // _COMPARED, 1))
    return sorted({number for number in (*near, *spaced) if 1 <= number <= steps})
