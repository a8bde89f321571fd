"""One optimizer step: gradients over the global batch, clipping, the update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from meshwright.errors import MeshwrightError
from meshwright.execute.batch import Batch
from meshwright.execute.gradients import complete, first_overflow, global_norm, scale_gradients
from meshwright.execute.optimize import Shards
from meshwright.execute.parallel import Parallel, set_training
from meshwright.execute.world import World
from meshwright.train.loss_scale import LossScale


class Updated(NamedTuple):
    """What a step computed: this rank's share of the loss, the gradient norm before clipping, and
    the first tensor that overflowed, in which case nothing was updated."""

    loss: torch.Tensor
    norm: float
    overflow: str | None


def gradients(parallel: Parallel, batch: Batch, world: World, loss_scale: float = 1.0) -> Updated:
    """Compute the gradients of the mean loss, still scaled, and their norm, already unscaled.

    `batch` holds the rows of this data rank, the same on all ranks that share them.
    """
    loss = parallel.backward(batch, loss_scale)
    complete(parallel.held, parallel.groups, tied=parallel.program.model.tie_embeddings)
    norm = global_norm(parallel.held, world.size) / loss_scale
    overflow = None if math.isfinite(norm) else _overflowed(parallel, world)
    return Updated(loss, norm, overflow)


def update(
    parallel: Parallel,
    batch: Batch,
    world: World,
    shards: Shards,
    optimizer: torch.optim.Optimizer,
    scale: LossScale,
    clip_norm: float,
    before_update: Callable[[], None] = lambda: None,
) -> Updated:
    """Compute the gradients, clip them to a global norm (0: not at all) and update the weights.

    Where a gradient overflows under fp16, every rank skips the update and the scale falls. In any
    other precision it raises `MeshwrightError` on every rank, with the weights as they were, unless
    `train.nonfinite` says to skip. `before_update` is called before any weight changes.
    """
    found = gradients(parallel, batch, world, scale.value)
    world.ledger.phase("update")
    skip = found.overflow is not None
    if skip and not scale.skips:
        raise MeshwrightError(
            f"the gradient of {found.overflow} is not finite; the weights are as they were before "
            "this step. A lower optimizer.lr, train.clip_norm or a longer optimizer.warmup_steps "
            'helps where training diverged; train.nonfinite = "skip" skips such steps'
        )
    if not skip:
        factor = 1.0 / scale.value
        if 0 < clip_norm < found.norm:
            factor *= clip_norm / found.norm
        if factor != 1.0:
            scale_gradients(parallel.held, factor)
        before_update()
        shards.take()
        optimizer.step()
        shards.give()
    shards.clear()
    scale.update(overflowed=skip)
    return found


def _overflowed(parallel: Parallel, world: World) -> str:
    """Return the first tensor of the model whose gradient is not finite on any rank."""
    names = list(parallel.program.shardings)
    mine = first_overflow(parallel.held)
    place = len(names) if mine is None else names.index(mine)
    places = [row[0] for row in world.gather_on_host([float(place)])]
    rank = places.index(min(places))
    place = int(min(places))
    return f"{names[place]} (rank {rank})" if place < len(names) else "the sum of squares"


def evaluate(parallel: Parallel, batches: list[Batch], world: World) -> float:
    """Return the mean loss in nats over the targets of some global batches."""
    set_training(parallel, False)
    total, count = world.sum_on_host(list(parallel.evaluate(batches)))
    set_training(parallel, True)
    return total / max(count, 1.0)
