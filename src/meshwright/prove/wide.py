"""Checks that half precision keeps gradient sums, the gradient norm and master weights in fp32.

The rounding of matmuls would hide it if these were rounded, too, so each has its own check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.comm.groups import Groups
from meshwright.comm.values import gather_values
from meshwright.comm.world import World
from meshwright.data.sampler import IGNORE
from meshwright.parallel.apply import Parallel
from meshwright.parallel.batch import Batch
from meshwright.parallel.data_parallel.gradients import GatheredParameter
from meshwright.parallel.data_parallel.sharded import DTYPES
from meshwright.parallel.gather import on_stages
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import (
    UNIT_ROUNDOFFS,
    Difference,
    Fault,
    build_small,
    mine,
    program_of,
    worse,
)
from meshwright.prove.verdict import Verdict
from meshwright.training.update import gradients

# A sum in fp32 of so many terms is off by less than so many roundings of what is summed.
_SUM = 32 * UNIT_ROUNDOFFS["fp32"]
# Of fp32 values one in 2^16 is a bf16 value, too; of rounded ones all are.
_MOST_ROUNDED = 0.25


def prove_sums(
    case: Case, groups: Groups, world: World, fault: Fault | None = None
) -> Iterator[Verdict]:
    """Check that gradients are summed over microbatches and ranks in fp32, and yield the verdict; a
    collective.

    The gradients of the even and of the odd microbatches are computed separately, with the same
    scale for each token: both are rounded as in the whole step, so their sum is its gradient. If
    ranks share the experts, one matmul computes the gradients of all ranks' microbatches, so only
    consecutive microbatches of a rank are separated. Router losses, which also count tokens without
    a target, are left out. Yields nothing for an odd number of microbatches, if
    `train.reduce_dtype` allows rounded sums, or if float8 matmuls have a scale that depends on all
    rows.
    """
    alone = {"router_aux_loss": 0.0, "router_z_loss": 0.0}
    case = replace(case, train=case.train.model_copy(update=alone))
    program, train, layout = program_of(case, world), case.train, case.layout
    together = train.batch if layout.ep == 1 else train.batch // layout.dp
    if together // layout.microbatch % 2 or train.reduce_dtype != "fp32" or train.fp8:
        return
    full_batch = make_batch(case, 0)
    # As many targets in each microbatch.
    full_batch = full_batch._replace(targets=full_batch.inputs.roll(-1, 1))
    odd = torch.arange(train.batch) % together // layout.microbatch % 2 == 1
    parallel = build_small(program, groups, world, fault)

    def found(batch: Batch, scale: float) -> list[Tensor | None]:
        gradients(parallel, mine(batch, program, world), world, scale)
        return [_taken(param) for param in parallel.trained]

    everything = found(full_batch, case.loss_scale)
    first, second = (found(_without(full_batch, rows), case.loss_scale / 2) for rows in (odd, ~odd))
    worst = Difference(0.0, _SUM, "", world.rank, 0)
    for param, *three in zip(parallel.trained, everything, first, second, strict=True):
        worst = worse(worst, Difference(_off(*three), _SUM, param.name, world.rank, param.stage))
    worst = max(gather_values(worst, Difference), key=lambda difference: difference.share)
    passed = worst.share <= 1
    layout_json = layout.model_dump(mode="json")
    yield Verdict("sums of gradients in fp32", layout_json, 0.0, worst.error, _SUM, passed)


def _taken(param: GatheredParameter) -> Tensor | None:
    """Return a copy of this rank's gradient of a parameter in fp64, and clear the gradient."""
    gradient = param.gradient
    param.parameter.grad = None
    return None if gradient is None else gradient.detach().clone().double()


def _without(batch: Batch, rows: Tensor) -> Batch:
    targets = batch.targets.clone()
    targets[rows] = IGNORE
    return batch._replace(targets=targets)


def _off(total: Tensor | None, a: Tensor | None, b: Tensor | None) -> float:
    """Return the distance of `a + b` from `total`, relative to the sum of their norms."""
    if total is None or a is None or b is None or not total.numel():
        return 0.0 if total is a is b or (total is not None and not total.numel()) else math.inf
    off = (total - a - b).norm().item() / max((a.norm() + b.norm()).item(), 1e-300)
    return off if off == off else math.inf


def gathered_norm(
    parallel: Parallel, gradient: Callable[[GatheredParameter], Tensor | None], world: World
) -> float:
    """Gather all gradients, and return the norm of the whole gradient, each parameter counted once;
    a collective.
    """
    squares: dict[str, float] = {}
    for param, tensor in on_stages(parallel, gradient):
        squares[param.name] = 0.0 if tensor is None else tensor.double().square().sum().item()
    all_squares: dict[str, float] = {}
    for rank_squares in gather_values(squares):
        all_squares |= rank_squares
    return math.sqrt(sum(all_squares.values()))


def rounded_shares(parallel: Parallel, case: Case, world: World) -> tuple[float, float]:
    """Return the smallest and largest share, over all shards, of weights that half precision
    represents exactly.

    Zeros do not count, since biases of an expert without tokens stay at their initial value.
    """
    half, shares = DTYPES[case.train.precision], list[float]()
    for param in parallel.trained:
        shard = param.shard[param.shard != 0]
        if shard.numel() >= 16:  # fewer may be so by chance
            shares.append((shard == shard.to(half)).double().mean().item())
    all_shares = [share for rank_shares in gather_values(shares) for share in rank_shares]
    return min(all_shares, default=0.0), max(all_shares, default=0.0)


def wide_verdicts(
    case: Case, norms: tuple[float, float], shares: tuple[float, float]
) -> Iterator[Verdict]:
    """Yield the verdicts on the gradient norm, and on the master weights: in fp32, or in bf16
    without masters.

    `norms` are (reported by the step, computed from gathered gradients), `shares` as
    `rounded_shares` returns them.
    """
    layout = case.layout.model_dump(mode="json")
    reported, gathered = norms
    error = abs(reported - gathered) / gathered if gathered else math.inf
    passed = error <= _SUM
    yield Verdict("norm of these gradients", layout, [gathered], [reported], _SUM, passed)
    lowest_share, share = shares
    if case.train.master == "none":
        yield Verdict(
            "weights in bf16, without masters", layout, 1.0, lowest_share, None, lowest_share == 1
        )
        return
    passed = share <= _MOST_ROUNDED
    yield Verdict("masters in fp32", layout, 0.0, share, _MOST_ROUNDED, passed)
