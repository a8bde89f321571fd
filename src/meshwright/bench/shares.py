"""Breaks down the time of a step: seconds by kind of work, from one rank's operations and waits."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.comm.clock import clock_of
from meshwright.comm.collective_recorder import CollectiveRecorder
from meshwright.comm.measured_step import recorded
from meshwright.comm.shared import SPACE
from meshwright.comm.tape import Tape
from meshwright.comm.world import World

# An operation is of the first kind whose pattern is found in its name, else in the name of what
# called it, and so on outwards.
_KINDS: Final = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("products", r"^aten::(addmm_?|mm|addmv|mv|_scaled_mm)$|^mkldnn::"),
        ("attention", r"scaled_dot_product|flash_attention|varlen|^meshwright::atten|^_Ring"),
        ("loss", r"^_(Loss|Head)|log_softmax|nll_loss"),
        ("norms", r"^_(RMS|Layer)Norm|native_layer_norm|^NativeLayerNorm"),
        ("rotation", r"^_Rotate"),
        ("activation", r"^_Gated|^aten::(silu|gelu)"),
        ("embedding", r"embedding|^Embedding"),
        ("optimizer", r"^Optimizer\.|_fused_adam|^aten::_foreach|linalg_vector_norm"),
        ("sums of gradients", r"AccumulateGrad"),
    )
)
# What is sent is told by the flight recorder's waits, which last as long.
_MESSAGES: Final = re.compile(rf"^c10d::|^gloo:|^nccl|_c10d_functional|^{SPACE}::")
# Waits, as a flight recorder names them by what is waited for.
_WAITS: Final = ("tp", "cp", "data", "bubble")
OTHER: Final = "other operations"
REST: Final = "Python and what calls operations"


def kinds() -> tuple[str, ...]:
    """Return all kinds in the order in which they are reported."""
    waits = tuple(f"waiting: {cause}" for cause in _WAITS)
    return (*(kind for kind, _ in _KINDS), OTHER, *waits, REST)


def shares(world: World, step: Callable[[], None], *, pp: int, dp: int) -> dict[str, float]:
    """Return the seconds of a call of `step` by kind, on this rank; a collective.

    On a GPU, an operation takes the time of its kernels, and the rest has the device's idle time.
    The profiler itself adds some microseconds of Python per operation.
    """
    is_cuda = world.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    world.barrier()
    with CollectiveRecorder(world.recorder), profile(activities=activities) as seen:
        world.recorder.tape = tape = Tape(clock_of(world.device))
        started = time.perf_counter()
        step()
        if is_cuda:
            torch.cuda.synchronize(world.device)
        seconds = time.perf_counter() - started
        tape.stop()
        world.recorder.tape = None
    causes = recorded(tape, world.recorder.label, pp=pp, dp=dp).causes
    seconds_by_kind = dict.fromkeys(kinds(), 0.0)
    seconds_by_kind |= {f"waiting: {cause}": causes.get(cause, 0.0) for cause in _WAITS}
    for kind, operation_s in _operations(seen, is_cuda):
        seconds_by_kind[kind] += operation_s
    seconds_by_kind[REST] = seconds - sum(seconds_by_kind.values())
    return seconds_by_kind


def _operations(seen: profile, is_cuda: bool) -> Iterator[tuple[str, float]]:
    """Yield the kind and the own seconds of each operation of the thread that steps."""
    events: Any = seen.events()  # type: ignore[no-untyped-call]
    threads = Counter(event.thread for event in events if event.name.startswith("aten::"))
    main = threads.most_common(1)[0][0]
    for event in events:
        if is_cuda:
            self_us = event.self_device_time_total
        else:
            self_us = event.self_cpu_time_total if event.thread == main else 0
        # What is no operator is Python's time, and what it waits for: a span of FSDP2's, too.
        is_operator = "::" in event.name and not event.name.startswith("FSDP::")
        kind = _kind(event) if self_us > 0 and is_operator else None
        if kind is not None:
            yield kind, self_us / 1e6


def _kind(event: Any) -> str | None:
    """Return the kind of an operation, None for a message."""
    while event is not None:
        if _MESSAGES.search(event.name):
            return None
        for kind, pattern in _KINDS:
            if pattern.search(event.name):
                return kind
        event = event.cpu_parent
    return OTHER
