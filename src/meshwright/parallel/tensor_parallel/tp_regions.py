"""Tensor-parallel regions: how activations enter and leave the sharded part of a block.

Megatron-LM, arXiv:1909.08053, section 3, and arXiv:2205.05198, section 4.2 for the sequence.
Asynchronous collectives return an `Arrival`, a function that waits and returns the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from meshwright.comm.groups import Link
from meshwright.comm.shared import operators
from meshwright.program.messages import CollectiveKind
from meshwright.program.tp_collectives import tp_collectives_of

# Waits for what was begun, and returns it.
Arrival = Callable[[], Tensor]


def all_reduce(x: Tensor, link: Link, op: str = "sum") -> Tensor:
    """Return the sum (or maximum) of x over the ranks of a link."""
    ops = operators(x, is_shared=link.is_shared)
    out: Tensor = ops.wait_tensor(ops.all_reduce(x.contiguous(), op, link.name))
    return out


def begin_sum(x: Tensor, link: Link) -> Arrival:
    """Start an all-reduce over the ranks of a link, in place if the tensor is contiguous."""
    ops = operators(x, is_shared=link.is_shared)
    # The compiler takes no operator that returns its argument, and finds the memory by itself.
    begin = ops.all_reduce if torch.compiler.is_compiling() else ops.all_reduce_
    out: Tensor = begin(x.contiguous(), "sum", link.name)
    return partial(ops.wait_tensor, out)


def begin_gather(x: Tensor, link: Link) -> Arrival:
    """Start to all-gather `[batch, seq, ...]` from the shards `[batch, seq / ranks, ...]`."""
    ops = operators(x, is_shared=link.is_shared)
    parts = ops.all_gather_into_tensor(x.contiguous(), link.size, link.name)

    def arrived() -> Tensor:
        gathered: Tensor = ops.wait_tensor(parts)
        if x.shape[0] == 1 and not link.in_pieces:
            return gathered.view(1, -1, *x.shape[2:])
        return torch.cat(torch.chunk(gathered, link.size, 0), 1)  # as a compiler knows it

    return arrived


def begin_scatter(x: Tensor, link: Link) -> Arrival:
    """Start to reduce-scatter `[batch, seq, ...]` to this rank's `[batch, seq / ranks, ...]`."""
    if x.shape[0] == 1 and not link.in_pieces:
        cut = x.view(link.size, -1, *x.shape[2:])
    else:
        cut = torch.cat(torch.chunk(x, link.size, 1), 0)
    ops = operators(x, is_shared=link.is_shared)
    out: Tensor = ops.reduce_scatter_tensor(cut.contiguous(), "sum", link.size, link.name)
    return partial(ops.wait_tensor, out)


class _Exit(torch.autograd.Function):
    """Leave a region: sums the ranks' partial outputs; the backward returns each rank's
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp_region: TPRegion) -> Tensor:
        ctx.tp_region = tp_region
        return _apart(tp_region.leaving(x), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _apart(ctx.tp_region.left(grad), grad), None


class _Entry(torch.autograd.Function):
    """Enter a region with the residual stream; the backward sums its gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp_region: TPRegion) -> Tensor:
        ctx.tp_region = tp_region
        return _apart(tp_region.entering(x)(), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tp_region.returning(grad)(), None


def _apart(out: Tensor, x: Tensor) -> Tensor:
    """Return `out`, or a view of it if it is the input x itself, as autograd requires."""
    return out.view_as(x) if out is x else out


class TPRegion:
    """A tensor-parallel region: the collectives at its borders, over the ranks of a link.

    The program decides the collectives, see `program.tp_collectives`. Without tp, the link is this
    rank alone. `gathers_again`: gathered inputs are gathered again for the backward, not saved.
    """

    def __init__(self, link: Link, sp: bool, *, gathers_again: bool = False) -> None:
        self.link = link
        self._collectives = tp_collectives_of(link.size, sp)
        self.gathers_again = gathers_again and self.gathers

    @property
    def gathers(self) -> bool:
        """Whether the input is all-gathered, because the residual stream is sharded by sequence."""
        return self._collectives.entry.forward == "all_gather"

    def entering(self, x: Tensor) -> Arrival:
        """Start the collective that makes the input of column-parallel layers from the stream."""
        return _begin(self._collectives.entry.forward, x, self.link)

    def returning(self, grad: Tensor) -> Arrival:
        """Start the collective that sums input gradients to the gradient of the residual stream.

        `grad` is overwritten, if possible.
        """
        return _begin(self._collectives.entry.backward, grad, self.link)

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of the region for the residual stream x; differentiable.

        Linear layers do not need it: they enter by themselves, and overlap collectives with
        matmuls.
        """
        inside: Tensor = _Entry.apply(x, self)  # type: ignore[no-untyped-call]
        return inside

    def leave(self, x: Tensor) -> Tensor:
        """Return the residual stream from partial sums of row-parallel layers; differentiable."""
        summed: Tensor = _Exit.apply(x, self)  # type: ignore[no-untyped-call]
        return summed

    def leaving(self, x: Tensor) -> Tensor:
        """Return the residual stream from this rank's partial sums, without overwriting them."""
        kind = self._collectives.exit.forward
        return all_reduce(x, self.link) if kind == "all_reduce" else _begin(kind, x, self.link)()

    def left(self, grad: Tensor) -> Tensor:
        """Return the gradient of this rank's partial sums from that of the residual stream."""
        return _begin(self._collectives.exit.backward, grad, self.link)()


_BEGINS: Final[Mapping[CollectiveKind, Callable[[Tensor, Link], Arrival]]] = {
    "all_reduce": begin_sum,
    "all_gather": begin_gather,
    "reduce_scatter": begin_scatter,
}


def _begin(kind: CollectiveKind | None, x: Tensor, link: Link) -> Arrival:
    """Start a collective of this kind on x; None: x is returned as it is."""
    return partial(_same, x) if kind is None else _BEGINS[kind](x, link)


def _same(x: Tensor) -> Tensor:
    return x
