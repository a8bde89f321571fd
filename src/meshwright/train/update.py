"""One optimizer step: microbatches, the loss over the global batch, clipping, the update."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from meshwright.data.sampler import IGNORE, Rows
from meshwright.execute.build import full_tensor
from meshwright.execute.data import reshard, set_last_microbatch
from meshwright.execute.world import World


class Batch(NamedTuple):
    """Rows of this rank on its device: int64 `[rows, seq]`; segments only where packed."""

    inputs: torch.Tensor
    targets: torch.Tensor
    segments: torch.Tensor | None

    @classmethod
    def of(cls, rows: Rows, device: torch.device) -> Batch:
        """Return sampled rows as tensors on a device."""
        inputs, targets, segments = (
            None if part is None else torch.from_numpy(part).to(device, non_blocking=True)
            for part in (rows.inputs, rows.targets, rows.segments)
        )
        assert inputs is not None
        assert targets is not None
        return cls(inputs, targets, segments)

    def split(self, size: int) -> list[Batch]:
        """Return microbatches of `size` rows."""
        starts = range(0, len(self.inputs), size)
        return [self.rows(slice(start, start + size)) for start in starts]

    def rows(self, some: slice) -> Batch:
        """Return some of the rows."""
        segments = None if self.segments is None else self.segments[some]
        return Batch(self.inputs[some], self.targets[some], segments)


def loss_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the summed cross-entropy in nats over the targets that are not ignored, in fp32."""
    logits = model(batch.inputs, segments=batch.segments)
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        batch.targets.flatten(),
        ignore_index=IGNORE,
        reduction="sum",
    )


def count_targets(batch: Batch, world: World) -> torch.Tensor:
    """Return the number of targets in the global batch, on the device, without waiting for it."""
    count = (batch.targets != IGNORE).sum()
    if world.size > 1:
        dist.all_reduce(count)
    return count.clamp(min=1)


def backward(model: nn.Module, batch: Batch, microbatch: int, world: World) -> torch.Tensor:
    """Accumulate the gradients of the mean loss over the global batch.

    Each microbatch contributes the sum of its token losses over the global number of targets, so
    the result does not depend on how the batch is cut. Returns this rank's share of the loss.
    """
    count = count_targets(batch, world)
    parts = batch.split(microbatch)
    loss = torch.zeros((), device=batch.inputs.device)
    for index, part in enumerate(parts):
        set_last_microbatch(model, index == len(parts) - 1)
        share = loss_sum(model, part) / count
        share.backward()  # type: ignore[no-untyped-call]
        loss += share.detach()
    return loss


def clip(model: nn.Module, clip_norm: float) -> torch.Tensor:
    """Clip the gradients to a global norm, 0 for not at all; returns the norm before."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if clip_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip_norm, norm)
    return full_tensor(norm)


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Batch], microbatch: int, world: World) -> float:
    """Return the mean loss in nats over the targets of some global batches."""
    total = count = 0.0
    for batch in batches:
        for part in batch.split(microbatch):
            total += loss_sum(model, part).item()
            count += float((part.targets != IGNORE).sum())
    reshard(model)
    total, count = world.sum_on_host([total, count])
    return total / max(count, 1.0)
