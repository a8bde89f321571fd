"""Expert parallelism: data-parallel ranks divide the experts, and tokens are sent to their experts.

GShard, arXiv:2006.16668, section 3.2, without capacities: no token is dropped. An all-to-all sends
the number of tokens for each expert; further ones send the tokens and their weights there, and the
results back. The received tokens are a batch with one expert per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.execute.transport.groups import Link
from meshwright.models.experts import Experts, Routing
from meshwright.models.grouped import Sorted, on_host


class _Trade(NamedTuple):
    """Rows that travel between the ranks of a link: how many go to each and come from each."""

    link: Link
    leaving: list[int]
    arriving: list[int]

    def there(self, rows: Tensor) -> Tensor:
        """Return the received rows for the sent ones."""
        return _traded(rows, self.leaving, self.arriving, self.link)

    def back(self, rows: Tensor) -> Tensor:
        """Return the rows that come back for the received ones."""
        return _traded(rows, self.arriving, self.leaving, self.link)


def over_ranks(
    experts: Experts,
    count: int,
    link: Link,
    received: Callable[[int], int],
    x: Tensor,
    routing: Routing,
) -> Tensor:
    """Return the output of all ranks' experts for tokens x `[tokens, dim]`, of the same shape.

    `experts` are this rank's of `count`: those of rank 0 come first. `received` estimates the
    number of received pairs from the number of sent ones, for tensors without values.
    """
    pairs = Sorted.of(routing.ids, count)
    counts = pairs.counts.view(link.size, -1)  # of each rank, of its experts
    ones = [1] * link.size
    theirs = _traded(counts, ones, ones, link)
    pair_count = routing.ids.numel()
    arriving = on_host(theirs.sum(1), received(pair_count))
    trade = _Trade(link, on_host(counts.sum(1), pair_count), arriving)
    rows, shares = _There.apply(x, routing.shares, pairs, trade)  # type: ignore[no-untyped-call]
    every = torch.arange(counts.shape[1], device=x.device).repeat(link.size)
    ids = every.repeat_interleave(theirs.flatten(), output_size=len(rows))
    out = experts(rows, Routing(ids[:, None], shares))
    back: Tensor = _Back.apply(out, pairs, trade, routing.ids.shape[-1])  # type: ignore[no-untyped-call]
    return back


class _There(torch.autograd.Function):
    """Tokens and shares to the ranks of their experts.

    What it needs is no saved tensor: a second forward for the backward would end with it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shares: Tensor, pairs: Sorted, trade: _Trade
    ) -> tuple[Tensor, Tensor]:
        ctx.pairs, ctx.trade, ctx.shape = pairs, trade, shares.shape
        return trade.there(x[pairs.tokens]), trade.there(pairs.sorted(shares)[:, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_rows: Tensor, to_shares: Tensor) -> tuple[Tensor | None, ...]:
        pairs: Sorted = ctx.pairs
        to_x = pairs.summed(ctx.trade.back(to_rows), ctx.shape[-1])
        to_share = ctx.trade.back(to_shares)[pairs.back].view(ctx.shape)
        return to_x, to_share, None, None


class _Back(torch.autograd.Function):
    """What experts have made back to their tokens, and its sum for each token."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, pairs: Sorted, trade: _Trade, top_k: int) -> Tensor:
        ctx.pairs, ctx.trade = pairs, trade
        return pairs.summed(trade.back(out), top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trade.there(grad[ctx.pairs.tokens]), None, None, None


def _traded(rows: Tensor, leaving: list[int], arriving: list[int], link: Link) -> Tensor:
    """Return the rows that an all-to-all brings for those that it takes, by rank."""
    found = torch.empty(sum(arriving), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    dist.all_to_all_single(found, rows.contiguous(), arriving, leaving, group=link.required)
    return found
