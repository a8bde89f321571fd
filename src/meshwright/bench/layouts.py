"""Layouts side by side on the ranks at hand: seconds of a step and the peak of each rank's memory.

Layouts take turns, so that the machine's noise hits all alike.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from meshwright.bench.memory import measure
from meshwright.bench.shares import kinds, shares
from meshwright.execute.build import build, seeded
from meshwright.execute.groups import open_groups
from meshwright.execute.optimize import Shards
from meshwright.execute.world import World
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.prove.reference import make_batch
from meshwright.spec.training import OptimizerSpec
from meshwright.train.loss_scale import LossScale
from meshwright.train.optimizer import build_optimizer
from meshwright.train.update import update


class Stepper:
    """A model under a layout with its optimizer; a call makes one step of training."""

    def __init__(self, world: World, case: Case) -> None:
        """Build it with weights of a seed, and rows of random tokens."""
        program = lower(case.model, case.train, case.layout)
        groups, source = open_groups(case.layout, world), seeded(case.model, 0)
        self._world, self._case = world, case
        compiled = case.train.is_compiled
        self._parallel = build(program, groups, world.device, source, compiled=compiled)
        self._shards = Shards(self._parallel.held, on_host=case.layout.offload == "optimizer")
        self._optimizer = build_optimizer(self._shards.leaves, OptimizerSpec())
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


def step_seconds(world: World, case: Case, steps: int) -> list[float]:
    """Return the seconds of some steps of training after a first one, on the slowest rank."""
    step, seconds = Stepper(world, case), []
    for _ in range(steps + 1):
        world.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    everyone = world.gather_on_host(seconds[1:])
    return [max(each) for each in zip(*everyone, strict=True)]


def step_shares(world: World, case: Case) -> list[dict[str, float]]:
    """Return the seconds of a step after two by kind of work, for each rank."""
    step = Stepper(world, case)
    for _ in range(2):
        step()
    found = shares(world, step, pp=case.layout.pp, dp=case.layout.dp)
    rows = world.gather_on_host([found[kind] for kind in kinds()])
    return [dict(zip(kinds(), row, strict=True)) for row in rows]


def peak_bytes(world: World, case: Case) -> list[int]:
    """Return the peak of a step's memory on each rank: of tensors alone, by rank."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
        step_seconds(world, case, 1)
        peak = float(torch.cuda.max_memory_allocated(world.device))
    else:
        peak = measure(world, case).peak.total
    return [int(row[0]) for row in world.gather_on_host([peak])]


def side_by_side(
    world: World, cases: Sequence[Case], rounds: int, steps: int, asked: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield what is measured, as it is: the case's number with its seconds, and what is asked for.

    That may be `memory`, the peaks of the ranks, and `shares`, where their time goes.
    """
    if "memory" in asked:
        for number, case in enumerate(cases):
            yield {"case": number, "peak_bytes": peak_bytes(world, case)}
    for _ in range(rounds):
        for number, case in enumerate(cases):
            yield {"case": number, "seconds": step_seconds(world, case, steps)}
    if "shares" in asked:
        for number, case in enumerate(cases):
            yield {"case": number, "shares": step_shares(world, case)}
