"""Layouts side by side on the ranks at hand: seconds of a step and the peak of each rank's memory.

Layouts take turns, so that the machine's noise hits all alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from meshwright.bench.memory import measure
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


def step_seconds(world: World, case: Case, steps: int) -> list[float]:
    """Return the seconds of some steps of training after a first one, on the slowest rank."""
    program = lower(case.model, case.train, case.layout)
    groups, source = open_groups(case.layout, world), seeded(case.model, 0)
    parallel = build(program, groups, world.device, source, compiled=case.train.is_compiled)
    shards = Shards(parallel.held, on_host=case.layout.offload == "optimizer")
    optimizer = build_optimizer(shards.leaves, OptimizerSpec())
    batch, scale = mine(make_batch(case, 0), program, world), LossScale.of(case.train)
    seconds = []
    for _ in range(steps + 1):
        world.barrier()
        started = time.perf_counter()
        update(parallel, batch, world, shards, optimizer, scale, case.train.clip_norm)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        seconds.append(time.perf_counter() - started)
    everyone = world.gather_on_host(seconds[1:])
    return [max(each) for each in zip(*everyone, strict=True)]


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
    world: World, cases: Sequence[Case], rounds: int, steps: int, with_memory: bool
) -> Iterator[dict[str, Any]]:
    """Yield what is measured, as it is: the case's number with its seconds, or its peaks."""
    if with_memory:
        for number, case in enumerate(cases):
            yield {"case": number, "peak_bytes": peak_bytes(world, case)}
    for _ in range(rounds):
        for number, case in enumerate(cases):
            yield {"case": number, "seconds": step_seconds(world, case, steps)}
