"""One optimizer step: gradients over the global batch, clipping, the update; fp16 loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm.world import World
from meshwright.errors import Diverged
from meshwright.parallel.apply import Parallel, set_training
from meshwright.parallel.batch import Batch
from meshwright.parallel.data_parallel.gradients import complete, global_norm
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.parallel.expert_parallel.routing import correct_routers
from meshwright.spec.training import TrainSpec
from meshwright.training.optimizer import step_scaled

START = 65536.0
# Doubled after this many steps without overflow, halved at one: arXiv:1710.03740, section 3.2, with
# the numbers of torch.amp.GradScaler.
GROWTH_STEPS = 2000


@dataclass
class LossScale:
    """The factor of the loss under fp16, and what happens when gradients overflow.

    `is_dynamic`: it adapts to overflows. `skips`: a step that overflows is skipped, else training
    ends; under fp16 that is normal, in other precisions `train.nonfinite` decides.
    """

    value: float = 1.0
    is_dynamic: bool = False
    skips: bool = False
    good_steps: int = 0

    @classmethod
    def of(cls, train: TrainSpec) -> LossScale:
        """Return the initial scale of a run: 1 unless the precision is fp16."""
        if train.precision != "fp16":
            return cls(skips=train.nonfinite == "skip")
        if train.loss_scale is not None:
            return cls(train.loss_scale, skips=True)
        return cls(START, is_dynamic=True, skips=True)

    @classmethod
    def settled(cls, train: TrainSpec) -> LossScale:
        """Return a constant scale for measurements: under fp16 a typical one of long runs."""
        scale = cls.of(train)
        return cls(2.0**10, skips=True) if scale.is_dynamic else scale

    def update(self, *, overflowed: bool) -> None:
        """Adapt a dynamic scale to whether a step's gradients overflowed on any rank."""
        if not self.is_dynamic:
            return
        if overflowed:
            self.value, self.good_steps = max(self.value / 2, 2.0**-24), 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0


class Updated(NamedTuple):
    """The results of a step, as device tensors.

    `loss` is this rank's part of the loss in nats, `norm` the gradient's before clipping, fp64. If
    that is not finite, nothing was updated, and `first` is the index in `Parallel.held` of this
    rank's first parameter with a non-finite gradient.
    """

    loss: Tensor
    norm: Tensor
    first: Tensor

    def numbers(self) -> Tensor:
        """Return loss, norm and first as one fp64 tensor `[3]` on the device."""
        return torch.stack([number.detach().double() for number in self])


def gradients(parallel: Parallel, batch: Batch, world: World, loss_scale: float = 1.0) -> Updated:
    """Compute gradients of the mean loss times `loss_scale`, and the norm of the unscaled
    gradients.

    `batch` has the sequences of this data rank, the same on all ranks that share them.
    """
    loss = parallel.backward(batch, loss_scale)
    complete(parallel.held, parallel.groups, parallel.sums)
    norm = global_norm(parallel.held, world.size, parallel.device)
    return Updated(loss, norm.total / loss_scale, norm.first)


def update(
    parallel: Parallel,
    batch: Batch,
    world: World,
    shards: Shards,
    optimizer: torch.optim.Optimizer,
    scale: LossScale,
    clip_norm: float,
    before_update: Callable[[Updated], None] = lambda updated: None,
) -> Updated:
    """Compute the gradients, clip them to a global norm (0: no clipping) and update the weights.

    If a gradient is not finite on any rank, no rank's weights and states change; `overflowed` says
    so once the norm is read. `before_update` is called before any weight changes.
    """
    updated = gradients(parallel, batch, world, scale.value)
    world.recorder.phase("update")
    before_update(updated)
    apply_gradients(parallel, shards, optimizer, updated, scale.value, clip_norm)
    return updated


def apply_gradients(
    parallel: Parallel,
    shards: Shards,
    optimizer: torch.optim.Optimizer,
    updated: Updated,
    loss_scale: float,
    clip_norm: float,
) -> None:
    """Update the weights and states with gradients that are complete on all ranks.

    Ranks exchange messages only for optimizers that need whole matrices.
    """
    shards.take()
    step_scaled(optimizer, updated.norm, loss_scale, clip_norm)
    shards.give()
    shards.clear()
    correct_routers(parallel.routers, updated.norm)


def overflowed(
    norm: float, first: int, parallel: Parallel, world: World, scale: LossScale, *, step: int
) -> str | None:
    """Return the first tensor with a non-finite gradient on any rank, or None; adapt the loss
    scale.

    `norm` and `first` are those of an `Updated`, read by the host. A collective if the norm, which
    is the same on all ranks, is not finite. Then a dynamic scale falls; if such steps are not
    skipped, every rank raises `Diverged`.
    """
    if math.isfinite(norm):
        scale.update(overflowed=False)
        return None
    tensor = _first_of_all(first, parallel, world)
    if not scale.skips:
        raise Diverged(
            f"step {step}: the gradient of {tensor} is not finite; this step changed no weights. "
            "A lower optimizer.lr, train.clip_norm or a longer optimizer.warmup_steps helps "
            'where training diverged; train.nonfinite = "skip" skips such steps'
        )
    scale.update(overflowed=True)
    return tensor


def _first_of_all(first: int, parallel: Parallel, world: World) -> str:
    """Return the first non-finite tensor in the model's order over all ranks, with its rank."""
    names = list(parallel.program.shardings)
    parameters = parallel.held
    place = names.index(parameters[first].name) if first < len(parameters) else len(names)
    places = [row[0] for row in world.gather_on_host([float(place)])]
    rank = places.index(min(places))
    place = int(min(places))
    return f"{names[place]} (rank {rank})" if place < len(names) else "the sum of squares"


def evaluate(parallel: Parallel, batches: Iterable[Batch], world: World) -> float:
    """Return the mean loss in nats over the targets of some global batches, without dropout."""
    set_training(parallel, False)
    total, count = world.sum_on_host(list(parallel.evaluate(batches)))
    set_training(parallel, True)
    return total / max(count, 1.0)
