"""Unusual training loops that are right, and wrong ones that look like them, for `watch`.

Each takes `watched` (which begins the watch of a model) and `fault` (what is put in, or None).
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshwright.prove.trainers.watch import watch
from trainer_loops import VOCAB, Summed, Tiny, loss_of, rows

STEPS, MICROBATCHES = 3, 2


def run_odd(world, name, fault, folder):
    """Return the verdict of a loop under `watch`, on rank 0."""
    loop, reference = LOOPS[name]
    with contextlib.ExitStack() as stack:

        def watched(model):
            options = {"folder": folder, "say": lambda line: None, "reference": reference}
            return stack.enter_context(watch(model, **options))

        holder = loop(watched, fault)
    return None if holder.verdict is None else holder.verdict.as_dict()


def targets_of(step, data_ranks):
    return sum(
        int((rows(step, m, d)[1] != -100).sum()) for m in range(MICROBATCHES) for d in data_ranks
    )


def divided_after_the_backward(watched, fault):
    """Sums of losses; the gradients are summed by hand, then divided by the number of targets."""
    model, rank, world = Tiny(), dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    holder = watched(model)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            ids, targets = rows(step, microbatch, rank)
            loss_of(model(ids), targets, 1).backward()
        count = targets_of(step, range(world))
        for name, p in model.named_parameters():
            if fault == "local targets":
                p.grad /= targets_of(step, [rank]) * world
            dist.all_reduce(p.grad)
            if fault != "local targets":
                p.grad /= count
            if fault == "head not divided" and "head" in name:
                p.grad *= count
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return holder


def hybrid_shards_that_sum(watched, fault):
    """HSDP whose sums are not divided: the loss is, by the number of targets on all ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = Tiny()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for part in parts if fault != "averaged besides" else ():
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    if fault == "a layer averages":
        parts[1].set_gradient_divide_factor(4.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    holder = watched(model)
    for step in range(STEPS):
        count = targets_of(step, range(world))
        for microbatch in range(MICROBATCHES):
            is_last = microbatch == MICROBATCHES - 1
            model.set_requires_gradient_sync(is_last)
            ids, targets = rows(step, microbatch, rank)
            loss_of(model(ids), targets, count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return holder


class Total(torch.autograd.Function):
    """A sum over ranks whose gradient every rank has already."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def sharded_loss(logits, targets, first):
    """Return the sum of the cross-entropy in fp32, of logits whose vocabulary ranks share out."""
    logits, size = logits.float(), logits.shape[-1]
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    exponents = Total.apply((logits - largest[..., None]).exp().sum(-1))
    is_here = (targets >= first) & (targets < first + size)
    places = (targets - first).clamp(0, size - 1)
    chosen = logits.gather(-1, places[..., None])[..., 0] - largest
    chosen = Total.apply(torch.where(is_here, chosen, torch.zeros_like(chosen)))
    return ((exponents.log() - chosen) * (targets != -100)).sum()


class WithLoss(nn.Module):
    """A model that returns its loss; the vocabulary of its head is whole, or this rank's share."""

    def __init__(self, ranks=1, rank=0, fault=None):
        super().__init__()
        self.body = Tiny()
        self.head, self.body.head = self.body.head, nn.Identity()
        self.ranks, self.first, self.fault = ranks, rank * VOCAB // ranks, fault
        size = VOCAB // ranks
        self.head.weight = nn.Parameter(self.head.weight.detach()[self.first :][:size].clone())
        self.head.weight.tensor_model_parallel = ranks > 1

    def forward(self, ids, targets):
        x = self.body(ids)
        if self.ranks == 1:
            flat = self.head(x).float().flatten(0, 1), targets.flatten()
            return F.cross_entropy(*flat, ignore_index=-100, reduction="sum")
        if self.fault != "no sum":
            x = Summed.apply(x, None)
        first = self.first if self.fault != "wrong index" else 0
        return sharded_loss(self.head(x), targets, first)


class ReturnsLogits(WithLoss):
    """The same, with the loss in the loop."""

    def forward(self, ids):
        x = self.body(ids)
        return self.head(x if self.ranks == 1 else Summed.apply(x, None))


def sharded_vocabulary(watched, fault, kind=WithLoss):
    """Loss in fp32 over a vocabulary that ranks share out."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = kind(world, rank, fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    holder = watched(model)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            ids, targets = rows(step, microbatch, 0)
            if kind is WithLoss:
                loss = model(ids, targets)
            else:
                loss = sharded_loss(model(ids), targets, model.first)
            (loss / targets_of(step, [0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return holder


class Gathered(torch.autograd.Function):
    """All ranks' keys or values, in the order of positions."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class Positions(nn.Module):
    """One layer of attention whose ranks may share out the positions of each row."""

    def __init__(self, ranks=1):
        super().__init__()
        tiny = Tiny()
        self.embed, self.head, self.ranks = tiny.embed, tiny.head, ranks
        self.q, self.k, self.v = (getattr(tiny.layers[0].attention, n) for n in "qkv")

    def forward(self, ids):
        x = self.embed(ids)
        k, v = self.k(x), self.v(x)
        first = 0
        if self.ranks > 1:
            k, v, first = Gathered.apply(k), Gathered.apply(v), dist.get_rank() * ids.shape[1]
        here = torch.arange(first, first + ids.shape[1])
        mask = here[:, None] >= torch.arange(k.shape[1])
        return self.head(x + F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=mask))


def shared_positions(watched, fault):
    """Context parallelism by hand: each rank reads half of each row."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Positions(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    holder = watched(model)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            ids, targets = (x.chunk(world, 1)[rank] for x in rows(step, microbatch, 0))
            loss_of(model(ids), targets, targets_of(step, [0])).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    return holder


LOOPS = {
    "divided after the backward": (divided_after_the_backward, None),
    "hybrid shards that sum": (hybrid_shards_that_sum, None),
    "sharded vocabulary": (sharded_vocabulary, WithLoss),
    "sharded logits": (lambda *args: sharded_vocabulary(*args, kind=ReturnsLogits), ReturnsLogits),
    "shared positions": (shared_positions, Positions),
    "shared positions, no reference": (shared_positions, None),
}
