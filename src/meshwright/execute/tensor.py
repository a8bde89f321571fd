"""Tensor and sequence parallelism: the linear layers, the embedding and the head over tp ranks.

Megatron-LM, arXiv:1909.08053, section 3, and arXiv:2205.05198, section 4.2 for the sequence. The
parameters are DTensors cut over tp; what flows between the modules are plain local tensors, and the
four collectives at the borders are autograd functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright.execute.deferred import Deferral, linear
from meshwright.execute.groups import Link

Edge = Callable[[Tensor], Tensor]


def local(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter as a plain tensor, through which gradients flow."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def all_reduce(x: Tensor, link: Link, op: str = "sum") -> Tensor:
    """Return the sum (or maximum) over the ranks of a link."""
    out: Tensor = torch.ops._c10d_functional.all_reduce(x.contiguous(), op, link.name)
    return _waited(out)


def gather_sequence(x: Tensor, link: Link) -> Tensor:
    """Return `[batch, seq, ...]` of the shards `[batch, seq / ranks, ...]`."""
    parts = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), link.size, link.name)
    parts = _waited(parts)
    if x.shape[0] == 1:
        return parts.view(1, -1, *x.shape[2:])
    return parts.view(link.size, *x.shape).transpose(0, 1).flatten(1, 2)


def scatter_sequence(x: Tensor, link: Link) -> Tensor:
    """Return this rank's `[batch, seq / ranks, ...]` of the ranks' sum of `[batch, seq, ...]`."""
    cut = x.view(x.shape[0], link.size, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)
    return _waited(
        torch.ops._c10d_functional.reduce_scatter_tensor(
            cut.contiguous(), "sum", link.size, link.name
        )
    )


def _waited(x: Tensor) -> Tensor:
    out: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return out


class _Border(torch.autograd.Function):
    """One operation forward and its transpose backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Edge, back: Edge) -> Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


class Borders:
    """How activations enter and leave the part of a block that is cut over tp.

    Without sequence parallelism the stream is whole on each rank: it enters as it is, and what
    leaves is summed. With it the stream is cut along the sequence: it is gathered on entry, and
    what leaves is summed and scattered. The transposes are each other.
    """

    def __init__(self, link: Link, sp: bool) -> None:
        self.link, self.sp = link, sp
        gather, scatter = partial(gather_sequence, link=link), partial(scatter_sequence, link=link)
        total = partial(all_reduce, link=link)
        self._into = (gather, scatter) if sp else (_same, total)
        self._out = (scatter, gather) if sp else (total, _same)

    def enter(self, x: Tensor) -> Tensor:
        """Return what column-parallel layers take; x `[batch, seq or its share, dim]`."""
        out: Tensor = _Border.apply(x, *self._into)  # type: ignore[no-untyped-call]
        return out

    def leave(self, x: Tensor) -> Tensor:
        """Return the stream of the partial sums of row-parallel layers."""
        out: Tensor = _Border.apply(x, *self._out)  # type: ignore[no-untyped-call]
        return out


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


class ColumnLinear(nn.Linear):
    """A linear layer whose outputs are cut: each rank computes its own, from the whole input.

    Also any linear layer whose weight gradient may be deferred: without tp it is a plain one.
    """

    borders: Borders
    deferral: Deferral

    @classmethod
    def take_over(cls, module: nn.Linear, borders: Borders, deferral: Deferral) -> None:
        """Make a linear layer one of this class, in place: its parameters keep their names."""
        module.__class__ = cls
        assert isinstance(module, ColumnLinear)
        module.borders, module.deferral = borders, deferral

    def forward(self, input: Tensor) -> Tensor:
        """Return `[..., out / ranks]` of `[..., in]`."""
        bias = None if self.bias is None else local(self.bias)
        return linear(input, self.weight, bias, self.deferral)


class RowLinear(ColumnLinear):
    """A linear layer whose inputs are cut: partial sums leave over the border, then the bias."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `[batch, seq or its share, out]` of `[batch, seq, in / ranks]`."""
        out = self.borders.leave(linear(input, self.weight, None, self.deferral))
        return out if self.bias is None else out + local(self.bias).to(out.dtype)


class VocabEmbedding(nn.Embedding):
    """An embedding whose rows are cut: tokens of other ranks look up zero, and the sum leaves."""

    borders: Borders

    @classmethod
    def take_over(cls, module: nn.Embedding, borders: Borders) -> None:
        """Make an embedding one of this class, in place."""
        module.__class__ = cls
        assert isinstance(module, VocabEmbedding)
        module.borders = borders

    def forward(self, input: Tensor) -> Tensor:
        """Return `[batch, seq or its share, dim]` of int64 ids `[batch, seq]`."""
        weight = local(self.weight)
        own = input - self.borders.link.rank * weight.shape[0]
        outside = (own < 0) | (own >= weight.shape[0])
        found = F.embedding(own.masked_fill(outside, 0), weight)
        return self.borders.leave(found.masked_fill(outside[..., None], 0))


def projection(borders: Borders, deferral: Deferral) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what replaces the model's head product: its share `[..., vocab / ranks]` of logits."""

    def project(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear(borders.enter(hidden), weight, None, deferral)

    return project
