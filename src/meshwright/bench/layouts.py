"""Measures layouts side by side on local ranks: step time, its breakdown, and peak memory."""

from __future__ import annotations

import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshwright.bench.memory_breakdown import measure
from meshwright.comm.clock import clock_of
from meshwright.comm.collective_recorder import CollectiveRecorder
from meshwright.comm.groups import open_groups
from meshwright.comm.measured_step import recorded
from meshwright.comm.shared import SPACE
from meshwright.comm.tape import Tape
from meshwright.comm.world import World
from meshwright.models.init import weight_std
from meshwright.parallel.build import Source, build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.shards import Region
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine, program_of
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, update

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
    """Return all kinds of work in the breakdown of a step's time, in the order of reports."""
    waits = tuple(f"waiting: {cause}" for cause in _WAITS)
    return (*(kind for kind, _ in _KINDS), OTHER, *waits, REST)


def shares(world: World, step: Callable[[], None], *, pp: int, dp: int) -> dict[str, float]:
    """Profile a call of `step` and return this rank's seconds by kind of work.

    On a GPU, an operation takes the time of its kernels, and the remaining kind includes idle time.
    The profiler adds some microseconds per operation. All ranks must call this.
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
    """Yield the kind and the self time in seconds of each operation of the main thread."""
    events: Any = seen.events()  # type: ignore[no-untyped-call]
    threads = Counter(event.thread for event in events if event.name.startswith("aten::"))
    main = threads.most_common(1)[0][0]
    for event in events:
        if is_cuda:
            self_us = event.self_device_time_total
        else:
            self_us = event.self_cpu_time_total if event.thread == main else 0
        # What is not an operator is Python's time, and what it waits for: a span of FSDP2's, too.
        is_operator = "::" in event.name and not event.name.startswith("FSDP::")
        kind = _kind(event) if self_us > 0 and is_operator else None
        if kind is not None:
            yield kind, self_us / 1e6


def _kind(event: Any) -> str | None:
    """Return the kind of an operation from its name or its callers' names; None for a message."""
    while event is not None:
        if _MESSAGES.search(event.name):
            return None
        for kind, pattern in _KINDS:
            if pattern.search(event.name):
                return kind
        event = event.cpu_parent
    return OTHER


class Stepper:
    """A model under a layout with its optimizer; a call runs one training step."""

    def __init__(self, world: World, case: Case) -> None:
        """Build the model with random weights, and a batch of random tokens.

        On a CPU the weights follow from a seed. A GPU draws them itself, as a CPU's generator would
        take minutes for billions of them.
        """
        program = program_of(case, world)
        is_cpu = world.device.type == "cpu"
        source = seeded(case.model, 0) if is_cpu else drawn(case.model, world.device)
        groups = open_groups(case.layout, world)
        self._world, self._case = world, case
        compiled = case.train.is_compiled
        self._parallel = build(program, groups, world.device, source, compiled=compiled)
        self._shards = Shards(self._parallel.trained, on_host=case.layout.offload == "optimizer")
        self._optimizer = build_optimizer(self._shards.leaves, self._shards.parts, OptimizerSpec())
        self._batch = mine(make_batch(case, 0), program, world)
        self._scale = LossScale.settled(case.train)

    def __call__(self) -> None:
        """Run one training step."""
        update(
            self._parallel,
            self._batch,
            self._world,
            self._shards,
            self._optimizer,
            self._scale,
            self._case.train.clip_norm,
        )
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)


def drawn(spec: ModelSpec, device: torch.device) -> Source:
    """Return a source of random weights, generated on the device without a seed."""

    def region_of(name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        sizes = [stop - start for start, stop in region]
        if name.endswith(".bias"):
            return torch.zeros(sizes, device=device)
        if len(sizes) == 1:
            return torch.ones(sizes, device=device)
        return torch.randn(sizes, device=device).mul_(weight_std(name, spec))

    return region_of


class Timed(NamedTuple):
    """The seconds of some steps on the slowest rank, and on GPUs the peak bytes of each rank."""

    seconds: list[float]
    peak_bytes: list[int]


def timed(
    world: World,
    case: Case,
    steps: int,
    after: Callable[[Stepper, Timed], object] = lambda step, result: None,
) -> Timed:
    """Return the times of `steps` training steps after a first one; frees GPU memory afterwards.

    `after` is called with the model and the result after the measurement.
    """
    step, is_cpu = Stepper(world, case), world.device.type == "cpu"
    _seconds(world, step)  # compiles, and makes the optimizer's state
    if not is_cpu:
        torch.cuda.reset_peak_memory_stats(world.device)
    seconds = _slowest(world, [_seconds(world, step) for _ in range(steps)])
    peaks: list[int] = []
    if not is_cpu:
        peak = float(torch.cuda.max_memory_allocated(world.device))
        peaks = [int(row[0]) for row in world.gather_on_host([peak])]
    result = Timed(seconds, peaks)
    after(step, result)
    del step
    if not is_cpu:
        release()
    return result


def release() -> None:
    """Return a GPU's cached memory to the device before the next model."""
    gc.collect()
    torch.cuda.empty_cache()


def _seconds(world: World, step: Stepper) -> float:
    world.barrier()
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _slowest(world: World, seconds: list[float]) -> list[float]:
    return [max(rank_seconds) for rank_seconds in zip(*world.gather_on_host(seconds), strict=True)]


def step_shares(world: World, case: Case) -> list[dict[str, float]]:
    """Return the seconds by kind of work in the third step, for each rank."""
    step = Stepper(world, case)
    for _ in range(2):
        step()
    own_shares = shares(world, step, pp=case.layout.pp, dp=case.layout.dp)
    rows = world.gather_on_host([own_shares[kind] for kind in kinds()])
    return [dict(zip(kinds(), row, strict=True)) for row in rows]


def peak_bytes(world: World, case: Case) -> list[int]:
    """Return the peak bytes of tensors in a step on each rank, from a profile on CPUs."""
    peak = measure(world, case).peak.total
    return [int(row[0]) for row in world.gather_on_host([peak])]


def side_by_side(
    world: World, cases: Sequence[Case], rounds: int, steps: int, asked: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield measurements of layouts as they become available, each with the case's index.

    They have its step times and, if `asked` has "memory" or "shares", the peak memory of the ranks
    or the breakdown of their time. Layouts alternate, `rounds` times.
    """
    asks_memory, is_cpu = "memory" in asked, world.device.type == "cpu"
    if asks_memory and is_cpu:
        for number, case in enumerate(cases):
            yield {"case": number, "peak_bytes": peak_bytes(world, case)}
    for _ in range(rounds):
        for number, case in enumerate(cases):
            result = timed(world, case, steps)
            measurement = {"case": number, "seconds": result.seconds}
            # A GPU counts by itself, in the very steps that are timed.
            yield measurement | (
                {"peak_bytes": result.peak_bytes} if asks_memory and not is_cpu else {}
            )
    if "shares" in asked:
        for number, case in enumerate(cases):
            yield {"case": number, "shares": step_shares(world, case)}
