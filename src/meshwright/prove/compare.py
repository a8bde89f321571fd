"""Compares the tensors of a parallel run with the reference, and computes tolerances of losses and
norms.

`expected.py` has the tolerance of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.groups import Groups
from meshwright.comm.values import gather_values
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
    """Return the program of a case, lowered for the kind of device that the ranks of `world` run
    on.
    """
    target = target_of(case.train, world.device, packed=case.packed, fsdp2=case.fsdp2)
    return lower(case.model, case.train, case.optimizer, case.layout, target)


def build_small(program: Program, groups: Groups, world: World, fault: Fault | None) -> Parallel:
    """Build this rank's parallel model of a small program, with the weights of `weights.telling`.

    `fault`, if given, then breaks the model; only tests use it. A collective.
    """
    source, compiled = telling(program.model, program.train.seed), program.train.is_compiled
    parallel = build(program, groups, world.device, source, compiled=compiled)
    if fault is not None:
        fault(parallel)
    return parallel


def mine(batch: Batch, program: Program, world: World) -> Batch:
    """Return this rank's sequences of a global batch, on its device: each data rank has the same
    number of consecutive ones, as in training.
    """
    layout = program.layout
    rows = share(program.train.batch, layout.mesh.data_rank(world.rank), layout.dp)
    return batch.rows(slice(rows.start, rows.stop)).to(world.device)


class Difference(NamedTuple):
    """The relative error of one tensor with its tolerance (`bound`), and the rank and pipeline
    stage that hold the tensor.
    """

    error: float
    bound: float
    tensor: str
    rank: int
    stage: int

    @property
    def share(self) -> float:
        """The error divided by its tolerance: above 1 fails; infinite for NaN."""
        ratio = self.error / self.bound
        return ratio if ratio == ratio else math.inf


class Compared(NamedTuple):
    """The result of comparing all tensors of a model: the one with the largest error, and the first
    that fails.

    Errors are ordered by their share of the tolerance. Which tensor is the worst may be chance
    where several are equally wrong, so a failure names the first wrong one in the order of
    computation; None if all pass.
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
    """Gather one whole tensor per trained parameter, and compare each with the reference; a
    collective.

    `tensor_of` returns a parameter's sharded tensor, such as its gradient; None counts as an
    infinite error. `order` lists the parameter names in the order of computation, and decides which
    failure is the first. Every rank returns the same result.
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
    by_rank = gather_values(worst, Difference)
    return Compared(
        max(by_rank, key=lambda difference: difference.share), first_of(wrong, order, world)
    )


def first_of(wrong: Sequence[Difference], order: Sequence[str], world: World) -> Difference | None:
    """Return the first wrong tensor on any rank, by its position in `order`, then by rank; None if
    no rank has any.

    `wrong` are this rank's. A collective; every rank returns the same.
    """
    places = {name: place for place, name in enumerate(order)}

    def place(difference: Difference) -> tuple[int, int]:
        return places[difference.tensor], difference.rank

    first = min(wrong, key=place, default=None)
    return min(
        (difference for difference in gather_values(first, Difference) if difference),
        key=place,
        default=None,
    )


def worse(a: Difference, b: Difference) -> Difference:
    """Return the difference with the larger share of its tolerance; `a` if they are equal."""
    return b if b.share > a.share or not a.tensor else a


def loss_tolerance(train: TrainSpec, model: ModelSpec, batch: Batch, loss: float) -> float:
    """Return the relative tolerance of a batch's mean loss, for the precision of `train`.

    The loss of one target has the rounding errors of its logits: about 12 roundings per layer, each
    with a standard deviation of `SPREAD` unit roundoffs. The mean over n targets with independent
    errors has 1/sqrt(n) of that. A few roundings of fp32 sums are added.
    """
    targets = max(int((batch.targets != IGNORE).sum()), 1)
    unit = 2.0**-4 if train.fp8 else UNIT_ROUNDOFFS[train.precision]
    target_error = ENLARGED * SPREAD * unit * math.sqrt(12 * model.n_layers) * logits_std(model)
    return DEVIATIONS * target_error / math.sqrt(targets) / loss + 16 * UNIT_ROUNDOFFS["fp32"]


def norm_tolerance(noises: Iterable[float]) -> float:
    """Return the relative tolerance of the norm of the whole gradient, from `noises`: the relative
    rounding error of each step's gradient.

    A norm changes by at most the norm of the error. Only the error's component along the gradient
    counts, but that is nearly all of it if few weights have most of the gradient, or if many
    elements share a rounding error. The noise of later steps includes that of their weights.
    """
    return MARGIN * max(noises) + 8 * UNIT_ROUNDOFFS["fp32"]
