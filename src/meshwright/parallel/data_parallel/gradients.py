"""Gradients between the backward and the update: sums and norms over every axis of the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.models.nf4 import dequantise, quantise
from meshwright.parallel.transport.groups import Groups, Link
from meshwright.program.gradient_sums import GradientSum
from meshwright.program.shards import Sharding

# Elements that a CPU adds up in fp32: a norm is 3e-7 short over SHORT of them, 1e-8 over a ROW.
SHORT: Final = 16384
ROW: Final = 1024


class HeldParameter(NamedTuple):
    """A parameter that this rank holds a shard of.

    `copies` is how many ranks hold the same shard, 0 if another entry already counts for it: the
    second copy of a tied matrix.
    """

    name: str
    stage: int
    parameter: nn.Parameter
    sharding: Sharding
    copies: int

    @property
    def shard(self) -> Tensor:
        """This rank's shard as a plain tensor that shares the parameter's memory."""
        return local_shard(self.parameter.detach())

    def fill(self, weights: Tensor, dtype: torch.dtype) -> None:
        """Take a shard's weights; in four bits they are kept of those rounded to `dtype`.

        Rows that `weights` don't have are padding.
        """
        shard = self.shard
        if self.sharding.part.four_bits:
            weights = quantise(weights.to(shard.device, dtype))
        shard[: len(weights)].copy_(weights)
        shard[len(weights) :].zero_()

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Return the shard: the run's own, or one in four bits as a copy in `dtype` on the host."""
        if not self.sharding.part.four_bits:
            return self.shard
        return dequantise(self.shard.cpu(), dtype)

    @property
    def gradient(self) -> Tensor | None:
        """The shard of the gradient, if there is one."""
        return None if self.parameter.grad is None else local_shard(self.parameter.grad)


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def complete(held: Sequence[HeldParameter], groups: Groups, sums: Iterable[GradientSum]) -> None:
    """Complete the sums that data parallelism doesn't: over tp, and between tied copies."""
    links = {"tp": groups.tp, "ends": groups.ends}
    for one in sums:
        of = [h.gradient for h in held if h.name in one.names]
        gradients = [gradient for gradient in of if gradient is not None]
        if one.axis is not None:
            _sum_together(gradients, links[one.axis])
        elif gradients:  # both ends of a V-shaped pipeline are on this rank
            first, second = gradients
            first.add_(second)
            second.copy_(first)


def _sum_together(tensors: list[Tensor], link: Link) -> None:
    """Sum tensors over a link in place, in one message."""
    if link.size == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=link.group)
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


class Norm(NamedTuple):
    """The gradient's norm, on the device; the host has not waited for it.

    `total` is the whole model's 2-norm, fp64. `first` is the index in `held` of this rank's first
    non-finite gradient, or the number of gradients if there is none.
    """

    total: Tensor
    first: Tensor


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, fp64 `[tensors]`, accurate to 1e-6 for any length.

    All tensors must be on the same device.
    """
    dtype = reduce(torch.promote_types, (one.dtype for one in tensors), torch.float32)
    if tensors[0].is_cuda:  # which adds up as a tree
        return torch.stack(torch._foreach_norm(list(tensors), dtype=dtype)).double()
    return torch.stack([_norm_on_host(one, dtype) for one in tensors]).double()


def _norm_on_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a 2-norm as that of its rows' norms, which are taken in fp64.

    A CPU's kernel adds up squares one by one, and is 0.2% short at 33 million elements. To fp64 it
    would convert the whole tensor first, in 25 times the time.
    """
    if tensor.numel() <= SHORT:
        norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
        return norm
    flat = tensor.reshape(-1)
    long = len(flat) // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:long].view(-1, ROW), dim=-1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[long:], dtype=dtype)
    whole: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest[None]]), dtype=torch.float64)
    return whole


@torch.no_grad()
def global_norm(held: list[HeldParameter], world_size: int, device: torch.device) -> Norm:
    """Return the 2-norm of the whole model's gradient, each element counted once.

    A shard that several ranks hold counts with its share on each of them, so one sum over the world
    is right for every layout.
    """
    there = [at for at, one in enumerate(held) if one.gradient is not None]
    gradients = [gradient for one in held if (gradient := one.gradient) is not None]
    total = torch.zeros((), dtype=torch.float64, device=device)
    first = torch.full((), len(held), device=device)
    if gradients:
        each = norms(gradients).unbind()
        # By copies: a tensor of them would have to come from the host.
        for copies in sorted({held[at].copies for at in there} - {0}):
            some = [norm for norm, at in zip(each, there, strict=True) if held[at].copies == copies]
            total += torch.stack(some).square().sum() / copies
        nothing = torch.zeros((), dtype=torch.float64, device=each[0].device)
        by_place = dict(zip(there, each, strict=True))
        every = torch.stack([by_place.get(at, nothing) for at in range(len(held))])
        bad = ~torch.isfinite(every)
        first = torch.where(bad.any(), bad.int().argmax(), first)
    if world_size > 1:
        dist.all_reduce(total)
    return Norm(total.sqrt(), first)


@torch.no_grad()
def scale_gradients(held: list[HeldParameter], factor: float) -> None:
    """Multiply all gradients."""
    gradients = [g for h in held if (g := h.gradient) is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
