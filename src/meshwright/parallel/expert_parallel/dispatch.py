"""Expert parallelism: data-parallel ranks divide the experts, and tokens are sent to their experts.

GShard, arXiv:2006.16668, section 3.2; without a capacity, no token is dropped. A first all-to-all
exchanges the number of tokens for each expert; others send the tokens and their shares to the
experts' ranks, and the experts' outputs back. What a rank receives is a batch of tokens with one
expert each. The shared expert computes while tokens, or their gradients, are in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.comm.flight_recorder import FlightRecorder, Pending
from meshwright.comm.groups import Link
from meshwright.models.experts import Experts
from meshwright.models.grouped import Sorted, on_host
from meshwright.models.routers import Routing


@dataclass(eq=False)
class _Trade:
    """An all-to-all of rows: how many go to each rank of a link, and come from each.

    `_on_the_way` are the transfers in flight, each with its send and receive buffers.
    """

    link: Link
    leaving: list[int]
    arriving: list[int]
    recorder: FlightRecorder
    _on_the_way: list[tuple[Pending, Tensor, Tensor]] = field(default_factory=list)

    def there(self, rows: Tensor) -> Tensor:
        """Send rows to the experts' ranks; return the rows that this rank's experts receive."""
        return _traded(rows, self.leaving, self.arriving, self.link)

    def back(self, rows: Tensor) -> Tensor:
        """Send rows back to their tokens' ranks; return the rows that this rank's tokens
        receive.
        """
        return _traded(rows, self.arriving, self.leaving, self.link)

    def begin_there(self, rows: Tensor) -> Tensor:
        """Start to send rows to the experts' ranks; return the buffer, which `wait` completes."""
        return self._begin(rows, self.leaving, self.arriving)

    def begin_back(self, rows: Tensor) -> Tensor:
        """Start to send rows back to their tokens' ranks; return the buffer, which `wait`
        completes.
        """
        return self._begin(rows, self.arriving, self.leaving)

    def _begin(self, rows: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        sent, received = rows.contiguous(), rows.new_empty(sum(arriving), *rows.shape[1:])
        group = self.link.required
        work = dist.all_to_all_single(received, sent, arriving, leaving, group=group, async_op=True)
        self._on_the_way.append((Pending(self.recorder, work), sent, received))
        return received

    def wait(self) -> list[Tensor]:
        """Wait for the transfers in flight, and return the received rows of each."""
        for pending, *_ in self._on_the_way:
            pending.wait()
        arrived = [received for *_, received in self._on_the_way]
        self._on_the_way.clear()
        return arrived


def send_to_experts(
    experts: Experts,
    count: int,
    link: Link,
    received: Callable[[int], int],
    recorder: FlightRecorder,
    x: Tensor,
    routing: Routing,
) -> Callable[[], Tensor]:
    """Start to send tokens x `[tokens, dim]` to their experts; return a function that finishes.

    That function waits for the tokens, runs the experts, sends the results back and returns each
    token's weighted sum, in the shape of x. `experts` are this rank's of `count` in all: those of
    rank 0 come first. For fake tensors, `received` returns how many pairs arrive, given the number
    that leave. `recorder` records the open messages.
    """
    pairs = Sorted.of(routing.ids, count, drops=routing.drops)
    counts = pairs.counts.view(link.size, -1)  # of each rank, of its experts
    ones = [1] * link.size
    incoming_counts = _traded(counts, ones, ones, link)
    pair_count = routing.ids.numel()
    arriving = on_host(incoming_counts.sum(1), received(pair_count))
    trade = _Trade(link, on_host(counts.sum(1), pair_count), arriving, recorder)
    on_the_way = _There.apply(x, routing.shares, pairs, trade)  # type: ignore[no-untyped-call]
    expert_ids = torch.arange(counts.shape[1], device=x.device).repeat(link.size)
    ids = expert_ids.repeat_interleave(incoming_counts.flatten(), output_size=sum(arriving))

    def results() -> Tensor:
        rows, shares = _Arrived.apply(*on_the_way, trade)  # type: ignore[no-untyped-call]
        out = experts(rows, Routing(ids[:, None], shares))
        back: Tensor = _Back.apply(out, pairs, trade, routing.ids.shape[-1])  # type: ignore[no-untyped-call]
        return back

    return results


class _There(torch.autograd.Function):
    """Start to send tokens and shares to the ranks of their experts.

    Its backward waits for the gradients that `_Arrived` has started to send back. It uses no saved
    tensors: unpacking one would trigger recomputation.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shares: Tensor, pairs: Sorted, trade: _Trade
    ) -> tuple[Tensor, Tensor]:
        ctx.pairs, ctx.trade, ctx.shape = pairs, trade, shares.shape
        rows = trade.begin_there(x[pairs.tokens])
        return rows, trade.begin_there(pairs.sorted(shares)[:, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        pairs: Sorted = ctx.pairs
        to_rows, to_shares = ctx.trade.wait()
        to_x = pairs.summed(to_rows, ctx.shape[-1])
        return to_x, pairs.of_tokens(to_shares).view(ctx.shape), None, None


class _Arrived(torch.autograd.Function):
    """Wait for tokens and shares; the backward starts to send their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shares: Tensor, trade: _Trade) -> tuple[Tensor, Tensor]:
        ctx.trade = trade
        trade.wait()
        return rows.view_as(rows), shares.view_as(shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_rows: Tensor, to_shares: Tensor) -> tuple[Tensor | None, ...]:
        trade: _Trade = ctx.trade
        trade.begin_back(to_rows)
        trade.begin_back(to_shares)
        return to_rows, to_shares, None  # of the shape that autograd asks for; `_There` has others


class _Back(torch.autograd.Function):
    """Sends the experts' outputs back to their tokens, and sums them for each token."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, pairs: Sorted, trade: _Trade, top_k: int) -> Tensor:
        ctx.pairs, ctx.trade = pairs, trade
        return pairs.summed(trade.back(out), top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trade.there(grad[ctx.pairs.tokens]), None, None, None


def _traded(rows: Tensor, leaving: list[int], arriving: list[int], link: Link) -> Tensor:
    """Return the rows that an all-to-all of `rows` receives, both in the order of ranks."""
    received = torch.empty(sum(arriving), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    dist.all_to_all_single(received, rows.contiguous(), arriving, leaving, group=link.required)
    return received
