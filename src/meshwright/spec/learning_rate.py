"""The learning rate of each step."""

from __future__ import annotations

import math

from meshwright.spec.training import OptimizerSpec


def learning_rate(step: int, steps: int, spec: OptimizerSpec) -> float:
    """Return the learning rate of a step, counted from 1 to `steps`.

    It rises linearly to `spec.lr` at step `warmup_steps`, and reaches `lr * min_lr_ratio` at the
    last step, or at `schedule_steps`, after which it stays there.
    """
    steps = spec.schedule_steps or steps
    if step <= spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    low = spec.min_lr_ratio
    begin = spec.warmup_steps  # the last step at the full rate
    if spec.schedule == "wsd":
        decay = spec.decay_steps if spec.decay_steps is not None else max(1, steps // 5)
        begin = steps - decay
    progress = min(1.0, max(0, step - begin) / max(1, steps - begin))
    if spec.schedule == "cosine":
        return spec.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))
    if spec.schedule in ("linear", "wsd"):
        return spec.lr * (1 - (1 - low) * progress)
    return spec.lr
