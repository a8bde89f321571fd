"""Timing: how long something takes when it is repeated, in the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

# Repetitions that a median is taken of.
_LEAST: Final = 5


def seconds_of(
    work: Callable[[], object], budget_s: float, device: torch.device | None = None
) -> float:
    """Return the median seconds of a call, repeated for about `budget_s` and five times at least.

    On CUDA the device is waited for after each call. One call before does not count.
    """

    def call() -> float:
        started = time.perf_counter()
        work()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    first = call()
    found = [call() for _ in range(max(_LEAST, round(budget_s / max(first, 1e-7))))]
    return statistics.median(found)


def seconds_together(work: Callable[[], object], times: int) -> float:
    """Return the median seconds of a call that every rank makes equally often."""
    work()
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def seconds_between(compute: Callable[[], object], work: Callable[[], object], times: int) -> float:
    """Return the mean seconds of a call that every rank makes, each time after computing.

    The mean, since what ranks wait for each other is not the same each time.
    """
    compute()
    work()
    total = 0.0
    for _ in range(times):
        compute()
        started = time.perf_counter()
        work()
        total += time.perf_counter() - started
    return total / times
