"""The tensors of a layout compared with one device's, and the tolerances of its numbers.

`expected.py` has what a tensor may be off by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.groups import Groups
from meshwright.comm.world import World
from meshwright.data.sampler import IGNORE
from meshwright.kernels.fp32_matmuls import target_of
from meshwright.parallel.apply import Parallel
from meshwright.parallel.batch import Batch
from meshwright.parallel.build import build
from meshwright.parallel.data_parallel.gradients import GatheredParameter
from meshwright.parallel.data_parallel.sharded import DTYPES
from meshwright.parallel.gather import on_stages
from meshwright.program.lower import Program, lower
from meshwright.prove.case import Case
from meshwright.prove.expected import MARGIN, Expected
from meshwright.prove.weights import logits_std, telling
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import TrainSpec
from meshwright.training.loop import share

T = TypeVar("T")

# The relative rounding error of one operation is at most this: 2^-24, 2^-8, 2^-11.
UNIT_ROUNDOFFS: Final = {
    precision: torch.finfo(dtype).eps / 2 for precision, dtype in DTYPES.items()
}
# So many standard deviations are allowed for a number with many independent roundings.
DEVIATIONS: Final = 4.0
# Standard deviation of one rounding error over its largest, for values of any size.
SPREAD: Final = 0.41
# A logit's error over the sum of its roundings: later layers amplify those of earlier ones.
ENLARGED: Final = 2.0

# Breaks something in a parallel model on purpose: only tests have one
Fault = Callable[[Parallel], None]


def program_of(case: Case, world: World) -> Program:
    """Return the program of a case on a world's devices."""
    target = target_of(case.train, world.device, packed=case.packed, fsdp2=case.fsdp2)
    return lower(case.model, case.train, case.optimizer, case.layout, target)


def build_small(program: Program, groups: Groups, world: World, fault: Fault | None) -> Parallel:
    """Return the parallel model of a small program, with a fault if there is one."""
    source, compiled = telling(program.model, program.train.seed), program.train.is_compiled
    parallel = build(program, groups, world.device, source, compiled=compiled)
    if fault is not None:
        fault(parallel)
    return parallel


def mine(batch: Batch, program: Program, world: World) -> Batch:
    """Return the rows of the global batch that this rank computes, as `train` divides it."""
    layout = program.layout
    rows = share(program.train.batch, layout.mesh.data_rank(world.rank), layout.dp)
    return batch.rows(slice(rows.start, rows.stop)).to(world.device)


class Difference(NamedTuple):
    """The relative error of the worst tensor, its tolerance, and the tensor's name."""

    error: float
    bound: float
    tensor: str
    rank: int
    stage: int

    @property
    def share(self) -> float:
        """The error divided by its bound; infinite if it is not a number."""
        ratio = self.error / self.bound
        return ratio if ratio == ratio else math.inf


class Compared(NamedTuple):
    """All tensors of a model against exact ones: the worst, and the first that is beyond its bound.

    The worst one says how good the whole is. Which one it is, is rounding where several are equally
    wrong, so a failure is told by the first in the order of computation: None if all are good.
    """

    worst: Difference
    first: Difference | None


def compare(
    parallel: Parallel,
    tensor_of: Callable[[GatheredParameter], Tensor | None],
    expected: Expected,
    world: World,
    order: Sequence[str],
) -> Compared:
    """Return how the tensors of all stages, gathered whole, compare; the same on every rank.

    `order` has the names in the order in which a step computes them.
    """
    worst, wrong = Difference(0.0, 1.0, "", world.rank, 0), list[Difference]()
    for param, tensor in on_stages(parallel, tensor_of):
        if param.name in expected.exact:
            pair = expected.difference(param.name, tensor)
        else:  # such as a state that the optimizer keeps of other parameters
            pair = (0.0 if tensor is None else math.inf), 1.0
        difference = Difference(*pair, param.name, world.rank, param.stage)
        worst = worse(worst, difference)
        if not difference.share <= 1:
            wrong.append(difference)
    by_rank = everyones(worst, world)
    return Compared(
        max(by_rank, key=lambda difference: difference.share), first_of(wrong, order, world)
    )


def first_of(wrong: Sequence[Difference], order: Sequence[str], world: World) -> Difference | None:
    """Return the first of all ranks' wrong tensors in an order, on the first rank that has it.

    None if there is none; a collective, the same on every rank.
    """
    places = {name: place for place, name in enumerate(order)}

    def place(difference: Difference) -> tuple[int, int]:
        return places[difference.tensor], difference.rank

    first = min(wrong, key=place, default=None)
    return min(
        (difference for difference in everyones(first, world) if difference),
        key=place,
        default=None,
    )


def worse(a: Difference, b: Difference) -> Difference:
    """Return the one that exceeds its bound more; the first if equal."""
    return b if b.share > a.share or not a.tensor else a


def loss_tolerance(train: TrainSpec, model: ModelSpec, batch: Batch, loss: float) -> float:
    """Return the relative tolerance of a mean loss.

    A target's loss has the rounding errors of its logits, about 12 per layer, each of `SPREAD`
    units; for the mean of independent ones, divided by the root of their number. Sums in fp32 add a
    little.
    """
    targets = max(int((batch.targets != IGNORE).sum()), 1)
    unit = 2.0**-4 if train.fp8 else UNIT_ROUNDOFFS[train.precision]
    target_error = ENLARGED * SPREAD * unit * math.sqrt(12 * model.n_layers) * logits_std(model)
    return DEVIATIONS * target_error / math.sqrt(targets) / loss + 16 * UNIT_ROUNDOFFS["fp32"]


def norm_tolerance(noises: Iterable[float]) -> float:
    """Return the relative tolerance of a whole gradient's norm; `noises` by step.

    A norm changes at most by the norm of what is added, the noise. Only the noise along the
    gradient counts, but if few weights have most of the gradient, or rows share rounding errors,
    this is nearly all of it. The noise of later steps includes that of their weights.
    """
    return MARGIN * max(noises) + 8 * UNIT_ROUNDOFFS["fp32"]


def everyones(value: T, world: World) -> list[T]:
    """Return a value of every rank, by rank; a collective."""
    if world.size == 1:
        return [value]
    values: list[T] = [value] * world.size
    dist.all_gather_object(values, value)
    return values
