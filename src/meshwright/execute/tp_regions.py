"""Tensor-parallel regions: how activations enter and leave the part of a block cut over tp.

Megatron-LM, arXiv:1909.08053, section 3, and arXiv:2205.05198, section 4.2 for the sequence. What
need not be waited for at once is begun, and gives an `Arrival`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.execute.groups import Link
from meshwright.execute.shared import operators

# Waits for what was begun, and returns it.
Arrival = Callable[[], Tensor]
Edge = Callable[[Tensor], Tensor]


def all_reduce(x: Tensor, link: Link, op: str = "sum") -> Tensor:
    """Return the sum (or maximum) over the ranks of a link."""
    ops = operators(x, is_shared=link.is_shared)
    out: Tensor = ops.wait_tensor(ops.all_reduce(x.contiguous(), op, link.name))
    return out


def begin_sum(x: Tensor, link: Link) -> Arrival:
    """Begin to sum over the ranks of a link, in the tensor's own memory where it is contiguous."""
    ops = operators(x, is_shared=link.is_shared)
    # The compiler takes no operator that returns its argument, and finds the memory by itself.
    begin = ops.all_reduce if torch.compiler.is_compiling() else ops.all_reduce_
    out: Tensor = begin(x.contiguous(), "sum", link.name)
    return partial(ops.wait_tensor, out)


def begin_gather(x: Tensor, link: Link) -> Arrival:
    """Begin to make `[batch, seq, ...]` of the shards `[batch, seq / ranks, ...]`."""
    ops = operators(x, is_shared=link.is_shared)
    parts = ops.all_gather_into_tensor(x.contiguous(), link.size, link.name)

    def arrived() -> Tensor:
        found: Tensor = ops.wait_tensor(parts)
        if x.shape[0] == 1:
            return found.view(1, -1, *x.shape[2:])
        return found.view(link.size, *x.shape).transpose(0, 1).flatten(1, 2)

    return arrived


def begin_scatter(x: Tensor, link: Link) -> Arrival:
    """Begin to make this rank's `[batch, seq / ranks, ...]` of the sum of `[batch, seq, ...]`."""
    cut = x.view(x.shape[0], link.size, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)
    ops = operators(x, is_shared=link.is_shared)
    out: Tensor = ops.reduce_scatter_tensor(cut.contiguous(), "sum", link.size, link.name)
    return partial(ops.wait_tensor, out)


class _Exit(torch.autograd.Function):
    """One operation forward and its transpose backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Edge, back: Edge) -> Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


class _Entry(torch.autograd.Function):
    """The stream into a region, and the sum of its gradient over the ranks back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp_region: TPRegion) -> Tensor:
        ctx.tp_region = tp_region
        inside = tp_region.entering(x)()
        return inside if tp_region.is_cut else inside.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tp_region.returning(grad)(), None


class TPRegion:
    """A tensor-parallel region: what enters and leaves it over the ranks of a link.

    Without tp the link is this rank alone.
    Without sequence parallelism the stream is whole on each rank: it enters as it is, and what
    leaves is summed. With it the stream is cut along the sequence: it is gathered on entry, and
    what leaves is summed and scattered. The transposes are each other.

    `gathers_again`: what was gathered is not kept for the backward, but gathered again there.
    """

    def __init__(self, link: Link, sp: bool, *, gathers_again: bool = False) -> None:
        self.link = link
        self.is_cut = sp and link.size > 1
        self.gathers_again = gathers_again and self.is_cut

    def entering(self, x: Tensor) -> Arrival:
        """Begin to make what column-parallel layers take of the stream."""
        return begin_gather(x, self.link) if self.is_cut else lambda: x

    def returning(self, grad: Tensor) -> Arrival:
        """Begin to make the stream's gradient of this rank's part of what the layers took.

        It is made in the memory of the part, where it can be.
        """
        if self.link.size == 1:
            return lambda: grad
        return (begin_scatter if self.is_cut else begin_sum)(grad, self.link)

    def enter(self, x: Tensor) -> Tensor:
        """Return what is inside of the region, of the stream; differentiable.

        For what is no linear layer: those enter by themselves, and send while they multiply.
        """
        found: Tensor = _Entry.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def leave(self, x: Tensor) -> Tensor:
        """Return the stream of the partial sums of row-parallel layers; differentiable."""
        if self.is_cut:
            out = _Exit.apply(x, self._scattered, self._gathered)  # type: ignore[no-untyped-call]
        else:
            total = partial(all_reduce, link=self.link)
            out = _Exit.apply(x, total, _same)  # type: ignore[no-untyped-call]
        found: Tensor = out
        return found

    def _scattered(self, x: Tensor) -> Tensor:
        return begin_scatter(x, self.link)()

    def _gathered(self, x: Tensor) -> Tensor:
        return begin_gather(x, self.link)()


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
