"""Tensors of a parallel model against those of one device: the tolerances, and how far off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.execute.batch import Batch
from meshwright.execute.build import build, seeded
from meshwright.execute.data import DTYPES
from meshwright.execute.gather import on_stages
from meshwright.execute.gradients import Held
from meshwright.execute.groups import Groups
from meshwright.execute.parallel import Parallel
from meshwright.execute.world import World
from meshwright.program.lower import Program
from meshwright.spec.training import TrainSpec

T = TypeVar("T")

# The relative rounding error of one operation: 2^-24, 2^-8, 2^-11.
UNIT_ROUNDOFFS: Final = {
    precision: torch.finfo(dtype).eps / 2 for precision, dtype in DTYPES.items()
}
# Largest difference of a tensor over its scale, see `expect`. Sums are taken in another order, so
# it is some roundings of the precision. The worst of the matrix on a CPU are MEASURED.
TOLERANCES: Final[Mapping[str, float]] = {
    **{precision: 32 * unit for precision, unit in UNIT_ROUNDOFFS.items()},
    "fp8": 2.0**-2,
}
# A tensor whose values cancel to less than this share of the largest of all is rounding noise.
FLOOR: Final = 1e-5

# Breaks something in a parallel model on purpose: only tests have one
Fault = Callable[[Parallel], None]


def rounding(train: TrainSpec) -> str:
    """Return what the tolerances of a training go by: its precision, or float8 products."""
    return "fp8" if train.fp8 else train.precision


class Difference(NamedTuple):
    """How far the worst tensor is off, and where."""

    error: float
    tensor: str
    rank: int
    stage: int


def build_small(program: Program, groups: Groups, world: World, fault: Fault | None) -> Parallel:
    """Return the parallel model of a small program, with a fault if there is one."""
    source, compiled = seeded(program.model, program.train.seed), program.train.is_compiled
    parallel = build(program, groups, world.device, source, compiled=compiled)
    if fault is not None:
        fault(parallel)
    return parallel


def mine(batch: Batch, program: Program, world: World) -> Batch:
    """Return the rows of the global batch that this rank computes."""
    layout = program.layout
    size, place = program.train.batch // layout.dp, layout.mesh.data_rank(world.rank)
    return batch.rows(slice(place * size, (place + 1) * size)).to(world.device)


class Expected(NamedTuple):
    """Whole tensors of one device by name, and what a difference in each is held against."""

    tensors: Mapping[str, Tensor]
    scales: Mapping[str, float]


def expect(tensors: Mapping[str, Tensor], noise: Mapping[str, float], precision: str) -> Expected:
    """Return what is expected, with the scale of each tensor: its largest value, or more.

    `noise` is by how much one device's own rounding has moved a tensor, where that is known: twice
    of it is tolerated, since a sum that cancels keeps the noise of its summands. The floor is for
    gradients that vanish in exact arithmetic, as that of a key's bias where no dim is rotated: a
    constant added to all scores of a softmax.
    """
    tops = {name: tensor.abs().max().item() for name, tensor in tensors.items()}
    floor = FLOOR * max(tops.values())
    bound = TOLERANCES[precision]
    scales = {name: max(top, floor, 2 * noise.get(name, 0.0) / bound) for name, top in tops.items()}
    return Expected(tensors, scales)


def compare(
    parallel: Parallel,
    tensor_of: Callable[[Held], Tensor | None],
    expected: Expected,
    world: World,
) -> Difference:
    """Return the worst tensor of all stages, gathered whole; the same on every rank."""
    worst = Difference(-1.0, "", world.rank, 0)
    for held, whole in on_stages(parallel, tensor_of):
        error = error_of(whole, expected.tensors[held.name], expected.scales[held.name])
        if error > worst.error:
            worst = Difference(error, held.name, world.rank, held.stage)
    return max(everyones(worst, world), key=lambda found: found.error)


def error_of(found: Tensor | None, expected: Tensor, scale: float) -> float:
    """Return the largest difference over a scale, infinite where it is not a number."""
    if not expected.numel():
        return 0.0
    if found is None:
        return float("inf")
    error = (found.to("cpu", torch.float32) - expected).abs().max().item() / scale
    return error if error == error else float("inf")


def everyones(mine: T, world: World) -> list[T]:
    """Return a value of every rank, by rank; a collective."""
    if world.size == 1:
        return [mine]
    found: list[T] = [mine] * world.size
    dist.all_gather_object(found, mine)
    return found
