"""Layouts side by side on local ranks: seconds of a step and the memory peak of each rank.

Layouts alternate, so that the machine's noise affects all alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.bench.memory import measure
from meshwright.bench.shares import kinds, shares
from meshwright.comm.groups import open_groups
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
from meshwright.training.loss_scale import LossScale
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import update


class Stepper:
    """A model under a layout with its optimizer; a call makes one step of training."""

    def __init__(self, world: World, case: Case) -> None:
        """Build it with random weights and rows of random tokens.

        On a CPU the weights are those of a seed. A GPU draws its own, as good for a measurement:
        billions of them would take a CPU's generator minutes.
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
        """Make a step."""
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
    """Return a source of random weights, drawn on a device region by region, without a seed."""

    def region_of(name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        sizes = [stop - start for start, stop in region]
        if name.endswith(".bias"):
            return torch.zeros(sizes, device=device)
        if len(sizes) == 1:
            return torch.ones(sizes, device=device)
        return torch.randn(sizes, device=device).mul_(weight_std(name, spec))

    return region_of


class Timed(NamedTuple):
    """Seconds of some steps on the slowest rank; on GPUs also the peak bytes of each rank."""

    seconds: list[float]
    peak_bytes: list[int]


def timed(
    world: World,
    case: Case,
    steps: int,
    after: Callable[[Stepper, Timed], object] = lambda step, result: None,
) -> Timed:
    """Return the time of some training steps after a first one; frees memory on GPUs.

    `after` is called with the model and its optimizer after the measurements.
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
    """Free a GPU's unused memory before the next model."""
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
    """Return the seconds of a step after two by kind of work, for each rank."""
    step = Stepper(world, case)
    for _ in range(2):
        step()
    own_shares = shares(world, step, pp=case.layout.pp, dp=case.layout.dp)
    rows = world.gather_on_host([own_shares[kind] for kind in kinds()])
    return [dict(zip(kinds(), row, strict=True)) for row in rows]


def peak_bytes(world: World, case: Case) -> list[int]:
    """Return the memory peak of a step on each rank: tensors only, on CPUs by a profile."""
    peak = measure(world, case).peak.total
    return [int(row[0]) for row in world.gather_on_host([peak])]


def side_by_side(
    world: World, cases: Sequence[Case], rounds: int, steps: int, asked: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield measurements as they come: the case's number, its seconds, and requested data.

    These may be `memory`, the peaks of the ranks, and `shares`, the breakdown of their time.
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
