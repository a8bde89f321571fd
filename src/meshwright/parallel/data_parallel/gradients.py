"""Gradients between the backward and the update: sums and norms over every axis of the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.comm.groups import Groups, Link
from meshwright.models.nf4 import dequantise, quantise
from meshwright.program.gradient_sums import GradientSum
from meshwright.program.shards import Sharding
from meshwright.torch_private import foreach_mul_, foreach_norm

# Elements that a CPU adds up in fp32: a norm is 3e-7 short over SHORT of them, 1e-8 over a ROW.
SHORT: Final = 16384
ROW: Final = 1024


class GatheredParameter(NamedTuple):
    """A parameter of which this rank has a shard.

    `copies` is how many ranks have the same shard, 0 if another entry already counts for it: the
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
        """Copy weights into the shard; NF4 is quantised from the weights rounded to `dtype`.

        Rows of the shard beyond those of `weights` are padding, and set to 0.
        """
        shard = self.shard
        if self.sharding.part.is_nf4:
            weights = quantise(weights.to(shard.device, dtype))
        shard[: len(weights)].copy_(weights)
        shard[len(weights) :].zero_()

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Return the shard itself, or for an NF4 weight a dequantised copy in `dtype` on
        the host.
        """
        if not self.sharding.part.is_nf4:
            return self.shard
        return dequantise(self.shard.cpu(), dtype)

    @property
    def gradient(self) -> Tensor | None:
        """This rank's shard of the gradient, or None."""
        return None if self.parameter.grad is None else local_shard(self.parameter.grad)


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def complete(
    params: Sequence[GatheredParameter], groups: Groups, sums: Iterable[GradientSum]
) -> None:
    """Sum gradients over tp and between tied copies, where data parallelism has not."""
    links = {"tp": groups.tp, "ends": groups.ends}
    for gradient_sum in sums:
        parts = [h.gradient for h in params if h.name in gradient_sum.names]
        gradients = [gradient for gradient in parts if gradient is not None]
        if gradient_sum.axis is not None:
            _sum_together(gradients, links[gradient_sum.axis])
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
    """The gradient's norm as device tensors, which the host has not waited for.

    `total` is the whole model's 2-norm, fp64. `first` is the index in `held` of this rank's first
    parameter with a non-finite gradient, or the length of `held` if there is none.
    """

    total: Tensor
    first: Tensor


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, fp64 `[tensors]`, accurate to 1e-6 for any length.

    All tensors must be on the same device.
    """
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    if tensors[0].is_cuda:  # which adds up as a tree
        return torch.stack(foreach_norm(list(tensors), dtype=dtype)).double()
    return torch.stack([_norm_on_host(tensor, dtype) for tensor in tensors]).double()


def _norm_on_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor's 2-norm on a CPU, as the fp64 norm of the norms of its rows.

    A CPU's kernel adds up squares one by one, and is 0.2% short at 33 million elements. With fp64
    accumulation it would convert the whole tensor first, which takes 25 times as long.
    """
    if tensor.numel() <= SHORT:
        norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
        return norm
    flat = tensor.reshape(-1)
    long = len(flat) // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:long].view(-1, ROW), dim=-1, dtype=dtype)
    tail = torch.linalg.vector_norm(flat[long:], dtype=dtype)
    total: Tensor = torch.linalg.vector_norm(torch.cat([rows, tail[None]]), dtype=torch.float64)
    return total


@torch.no_grad()
def global_norm(params: list[GatheredParameter], world_size: int, device: torch.device) -> Norm:
    """Return the 2-norm of the whole model's gradient, each element counted once.

    A shard that n ranks have counts 1/n on each of them, so one sum over the world is right for
    every layout. A collective.
    """
    with_gradient = [index for index, param in enumerate(params) if param.gradient is not None]
    gradients = [gradient for param in params if (gradient := param.gradient) is not None]
    total = torch.zeros((), dtype=torch.float64, device=device)
    first = torch.full((), len(params), device=device)
    if gradients:
        local_norms = norms(gradients).unbind()
        # By copies: a tensor of them would have to come from the host.
        for copies in sorted({params[index].copies for index in with_gradient} - {0}):
            shared = [
                norm
                for norm, index in zip(local_norms, with_gradient, strict=True)
                if params[index].copies == copies
            ]
            total += torch.stack(shared).square().sum() / copies
        nothing = torch.zeros((), dtype=torch.float64, device=local_norms[0].device)
        by_index = dict(zip(with_gradient, local_norms, strict=True))
        all_norms = torch.stack([by_index.get(index, nothing) for index in range(len(params))])
        bad = ~torch.isfinite(all_norms)
        first = torch.where(bad.any(), bad.int().argmax(), first)
    if world_size > 1:
        dist.all_reduce(total)
    return Norm(total.sqrt(), first)


@torch.no_grad()
def scale_gradients(params: list[GatheredParameter], factor: float) -> None:
    """Multiply all gradients by `factor` in place."""
    gradients = [g for h in params if (g := h.gradient) is not None]
    if gradients:
        foreach_mul_(gradients, factor)
