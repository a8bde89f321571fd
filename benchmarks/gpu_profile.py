"""A profile of one step as text: what the device ran for how long, and how long it had nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

MOST: Final = 15
_WIDTH: Final = 72


class Ran(NamedTuple):
    """A kernel, or an operator of a CPU, once: its name and seconds."""

    name: str
    seconds: float


def profiled(step: Callable[[], None], device: torch.device) -> str:
    """Return as text what a step ran, with shares of its time; a step ends when the device has."""
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as seen:
        started = time.perf_counter()
        step()
        seconds = time.perf_counter() - started
    return as_text(list(ran(seen, is_cuda=is_cuda)), seconds, "GPU" if is_cuda else "CPU")


def ran(seen: profile, *, is_cuda: bool) -> Iterable[Ran]:
    """Yield what a device ran: kernels and copies of a GPU, operators by their own time of a CPU.

    What somebody has named for a profile is no kernel, although it is drawn on the GPU, too.
    """
    events: Any = seen.events()  # type: ignore[no-untyped-call]
    for event in events:
        if not is_cuda:
            yield Ran(event.name, event.self_cpu_time_total / 1e6)
        elif event.device_type == torch.autograd.DeviceType.CUDA and not getattr(
            event, "is_user_annotation", False
        ):
            yield Ran(event.name, event.time_range.elapsed_us() / 1e6)


def as_text(found: Iterable[Ran], seconds: float, device: str, most: int = MOST) -> str:
    """Return a table of what took longest, in shares of a step of so many seconds."""
    total, calls = Counter[str](), Counter[str]()
    for one in found:
        total[one.name] += one.seconds  # type: ignore[assignment]
        calls[one.name] += 1
    busy = sum(total.values())
    lines = [
        f"a profiled step: {seconds * 1e3:.1f} ms; what the {device} ran adds up to "
        f"{busy / seconds:.1%} of it, in {sum(calls.values()):,} calls",
        f"{'share':>6}  {'ms':>9}  {'calls':>7}  name",
    ]
    for name, took in total.most_common(most):
        short = name if len(name) <= _WIDTH else f"{name[: _WIDTH - 3]}..."
        lines.append(f"{took / seconds:6.1%}  {took * 1e3:9.2f}  {calls[name]:7}  {short}")
    rest = busy - sum(took for _, took in total.most_common(most))
    if len(total) > most:
        others = f"{len(total) - most} others"
        lines.append(f"{rest / seconds:6.1%}  {rest * 1e3:9.2f}  {'':7}  {others}")
    return "\n".join(lines)
