"""Context parallelism: attention over a sequence that is sharded over the ranks of a group.

`Ring` and `Ulysses` replace `Attention.core`. Each rank has the positions that `positions` returns,
the same for q, k and v. `Ring` passes keys and values around and merges the results of blocks;
`Ulysses` exchanges positions for heads by an all-to-all, and attends to the whole sequence with a
part of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.errors import ConfigError, refusal
from meshwright.kernels.block_attention import BlockAttention
from meshwright.models.attention import Core, attend
from meshwright.models.context import causal_mask
from meshwright.models.sinks import sink_gradient
from meshwright.parallel.context_parallel.ring import (
    RingPlace,
    RingWork,
    attend_round,
    compiled_ring,
    differentiate_round,
    enrol,
    in_ring_order,
)
from meshwright.program.attention import UNBOUNDED, ScoreBounds
from meshwright.program.pieces import held


def positions(kind: Literal["ring", "ulysses"], seq_len: int, cp: int, rank: int) -> Tensor:
    """Return the positions of a sequence on one rank of `cp`, int64 `[seq_len / cp]`, ascending.

    `kind` ring assigns two chunks to each rank, to balance causal attention; ulysses one. Raises
    `ConfigError` if the sequence doesn't divide evenly.
    """
    pieces = held(kind, cp, rank)
    total = cp * len(pieces)
    if seq_len % total:
        below = seq_len // total * total
        raise ConfigError(
            refusal(
                f"{kind} context parallelism cuts the sequence into {total} equal chunks "
                f"(cp = {cp}), and {seq_len} is not a multiple",
                legal=[n for n in (below, below + total) if n],
            )
        )
    return torch.arange(seq_len).view(total, -1)[list(pieces)].flatten()


class Ring:
    """Ring attention: causal, over a sequence that is divided as `positions` says.

    arXiv:2310.01889, with the balanced order of arXiv:2311.09431 and Llama 3, section 3.3.2. It has
    no state between calls. `block` computes one block of attention; None: the fastest for the
    device (tests set it). `recorder` records this rank's waits.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        block: BlockAttention | None = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        size = dist.get_world_size(group)
        self.place = RingPlace(group, dist.get_rank(group), size, recorder or FlightRecorder())
        self.block = block
        self.name = enrol(self.place)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Tensor | None = None,
        scores: ScoreBounds = UNBOUNDED,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of this rank's queries, of their shape and dtype.

        q `[batch, heads, seq / cp, head_dim]`, k and v `[batch, kv_heads, seq / cp, head_dim]`.
        `segments` int `[batch or 1, seq]`, the whole row in natural order and the same on all
        ranks: a query sees keys of its own segment only. sinks `[heads]`.
        """
        assert q.shape[2] % 2 == 0, "the ring holds two chunks on each rank"
        assert self.block is None or scores.cap is None, "a block of your own knows no cap"
        if torch.compiler.is_compiling() and self.block is None and sinks is None:
            return compiled_ring(q, k, v, segments, scores, self.name)
        if self.block is None:
            work = RingWork.of(self.place, q, segments, scores)
        else:
            work = RingWork(self.place, scores, self.block, self.block)
        out: Tensor = _RingAttention.apply(q, k, v, sinks, segments, work)  # type: ignore[no-untyped-call]
        return out


class Ulysses:
    """Ulysses attention: causal, with an all-to-all before (positions to heads) and one after.

    The number of key heads must be a multiple of the ranks. arXiv:2309.14509. `core` attends to the
    whole sequence, given document bounds; None: plain attention, given segments.
    """

    def __init__(self, group: dist.ProcessGroup, core: Core | None = None) -> None:
        self.group, self.core = group, core or _by_mask
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None = None,
        scores: ScoreBounds = UNBOUNDED,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of this rank's queries; shapes as in `Ring`."""
        assert k.shape[1] % self.size == 0, "each rank gets whole heads of keys"
        q, k, v = _ToHeads.apply(self.group, self.size, q, k, v)  # type: ignore[no-untyped-call]
        local_sinks = (
            None if sinks is None else sinks.chunk(self.size)[self.rank]
        )  # as `_to_heads` cuts
        out = self.core(q, k, v, documents, scores, local_sinks)
        back: Tensor = _ToPositions.apply(self.group, self.size, out)  # type: ignore[no-untyped-call]
        return back


def _by_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    scores: ScoreBounds = UNBOUNDED,
    sinks: Tensor | None = None,
) -> Tensor:
    return attend(q, k, v, causal_mask(q, segments, None), scores, sinks)


class _ToHeads(torch.autograd.Function):
    """All-to-all from all heads of a rank's positions to a part of the heads of all positions."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, size: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.size = group, size
        return _to_heads(tensors, group, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_positions(grads, ctx.group, ctx.size)


class _ToPositions(torch.autograd.Function):
    """The inverse of `_ToHeads`, for one tensor; its backward is `_ToHeads`."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, size: int, tensor: Tensor) -> Tensor:
        ctx.group, ctx.size = group, size
        return _to_positions((tensor,), group, size)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_heads((grad,), ctx.group, ctx.size)


# Both have a token's heads together in memory, as the products on both sides do: what is traded is
# copied once before and once after, in rows of several heads.


def _to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup, size: int) -> tuple[Tensor, ...]:
    """Return `[batch, heads / size, seq, head_dim]` of each `[batch, heads, seq / size, head_dim]`.

    Rank i gets the i-th share of the heads, from all ranks in their order.
    """
    shares = [_cut(x.transpose(1, 2), 2, size) for x in tensors]
    sent = torch.cat([share.permute(2, 0, 1, 3, 4) for share in shares], 3)
    received = _trade(sent, group).transpose(0, 1).flatten(1, 2).transpose(1, 2)
    return torch.split(received, [share.shape[3] for share in shares], 1)


def _to_positions(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, size: int
) -> tuple[Tensor, ...]:
    """Return `[batch, heads, seq / size, head_dim]` of each `[batch, heads / size, seq, head_dim]`.

    Rank i gets the i-th share of the positions, of the heads of all ranks in their order.
    """
    shares = [_cut(x.transpose(1, 2), 1, size) for x in tensors]
    sent = torch.cat([share.transpose(0, 1) for share in shares], 3)
    received = torch.split(_trade(sent, group), [share.shape[3] for share in shares], 3)
    return tuple(part.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2) for part in received)


def _cut(x: Tensor, dim: int, size: int) -> Tensor:
    """Return a view of x with one dim split in two, `[size, dim / size]`."""
    return x.reshape(*x.shape[:dim], size, -1, *x.shape[dim + 1 :])


def _trade(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send x[i] to rank i; return the tensors received from all ranks, stacked."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        segments: Tensor | None,
        work: RingWork,
    ) -> Tensor:
        if segments is not None:
            segments = in_ring_order(segments, work.place.size)
        out, lse = attend_round(q, k, v, segments, work, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks, segments)
        ctx.work = work
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, segments = ctx.saved_tensors
        to_sinks = None if sinks is None else sink_gradient(grad, out, lse, sinks)
        grads = differentiate_round(grad, q, k, v, out, lse, segments, ctx.work)
        return *grads, to_sinks, None, None
