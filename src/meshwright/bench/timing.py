"""Timing: how long something takes when it is repeated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

# Repetitions that are made in any case.
_LEAST: Final = 3


def seconds_of(
    work: Callable[[], object], budget_s: float, device: torch.device | None = None
) -> float:
    """Return the seconds of a call, repeated for about `budget_s`: see `seconds_in_turns`."""
    return seconds_in_turns([work], budget_s, device)[0]


def seconds_in_turns(
    works: Sequence[Callable[[], object]], budget_s: float, device: torch.device | None = None
) -> list[float]:
    """Return the seconds of some calls that take turns for about `budget_s`, three times at least.

    The median of each. What else a machine does comes in bursts, longer than a call: in turns they
    hit all calls alike, and not those of one. On CUDA the device is waited for after each call.
    One call of each before does not count.
    """

    def call(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    first = sum(call(work) for work in works)
    turns = max(_LEAST, round(budget_s / max(first, 1e-7)))
    found = [[call(work) for work in works] for _ in range(turns)]
    return [statistics.median(each) for each in zip(*found, strict=True)]


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
