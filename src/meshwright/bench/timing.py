"""Measures the time of repeated calls."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

# The minimum number of repetitions.
_LEAST: Final = 3
# Seconds of calls of one kind that a GPU gets at once: much more than waiting for it takes.
_BURST_S: Final = 0.02
_MOST: Final = 100


def seconds_of(
    work: Callable[[], object], budget_s: float, device: torch.device | None = None
) -> float:
    """Return the median seconds of a call repeated for about `budget_s`: see `seconds_in_turns`."""
    return seconds_in_turns([work], budget_s, device)[0]


def seconds_in_turns(
    works: Sequence[Callable[[], object]], budget_s: float, device: torch.device | None = None
) -> list[float]:
    """Return the median seconds of each of several calls, which alternate for about `budget_s`.

    Disturbances of a machine last longer than a call, so alternating spreads them over all calls.
    On a CPU with one thread, the time is that thread's CPU time, without what other processes or
    ranks take of its core, which predictions account for separately
    (`runtime.pricing.planned.slower`). On CUDA, each turn has as many calls as take some
    milliseconds, followed by one synchronization: the host runs ahead, as in training. The first
    call of each does not count.
    """
    is_cuda = device is not None and device.type == "cuda"
    clock = time.perf_counter if is_cuda or torch.get_num_threads() > 1 else time.thread_time

    def call(work: Callable[[], object], times: int = 1) -> float:
        started = clock()
        for _ in range(times):
            work()
        _wait(device)
        return (clock() - started) / times

    first = [call(work) for work in works]
    times = [1] * len(works)
    if is_cuda:  # the first call has loaded kernels
        first = [call(work) for work in works]
        times = [min(_MOST, math.ceil(_BURST_S / max(call_s, 1e-7))) for call_s in first]
    turn = sum(call_s * often for call_s, often in zip(first, times, strict=True))
    turns = max(_LEAST, round(budget_s / max(turn, 1e-7)))
    measured = [
        [call(work, often) for work, often in zip(works, times, strict=True)] for _ in range(turns)
    ]
    return [statistics.median(call_seconds) for call_seconds in zip(*measured, strict=True)]


def seconds_together(work: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the median seconds of a call that all ranks make equally often.

    On CUDA, measured from an idle device until the device has finished.
    """
    work()
    measured = []
    for _ in range(times):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        measured.append(time.perf_counter() - started)
    return statistics.median(measured)


def seconds_between(
    compute: Callable[[], object], work: Callable[[], object], times: int, device: torch.device
) -> float:
    """Return the mean seconds of a call that every rank makes after computing.

    The mean is used because ranks wait for each other for varying times. On CUDA as in
    `seconds_together`.
    """
    compute()
    work()
    total = 0.0
    for _ in range(times):
        compute()
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        total += time.perf_counter() - started
    return total / times


def _wait(device: torch.device | None) -> None:
    """Synchronize with the device if it is a GPU."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
