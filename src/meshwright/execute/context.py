"""Context parallelism: attention over a sequence that is cut between the ranks of a group.

`Ring` and `Ulysses` stand in for `Attention.core`. Each rank holds the positions that `positions`
lists, of q, k and v alike. `Ring` passes keys and values round and merges what each block gives;
`Ulysses` trades positions for heads, and attends to the whole sequence with a share of the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.errors import ConfigError, refusal
from meshwright.execute.block_attention import BlockAttention, choose, wide
from meshwright.execute.flight_recorder import FlightRecorder, Pending
from meshwright.models.attention import Core, attend
from meshwright.models.context import causal_mask
from meshwright.program.attention import ALL_SCORES, Scores


def positions(kind: Literal["ring", "ulysses"], seq_len: int, cp: int, rank: int) -> Tensor:
    """Return the positions that a rank of a group of `cp` holds, int64 `[seq_len / cp]`, ascending.

    Ring: the sequence is cut into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r, so that
    all ranks have equal work under the causal mask. Llama 3 (arXiv:2407.21783), section 3.3.2.
    Ulysses: the r-th of cp chunks.
    Raises `ConfigError` where the sequence does not cut evenly.
    """
    pieces = 2 * cp if kind == "ring" else cp
    if seq_len % pieces:
        below = seq_len // pieces * pieces
        raise ConfigError(
            refusal(
                f"{kind} context parallelism cuts the sequence into {pieces} equal chunks "
                f"(cp = {cp}), and {seq_len} is not a multiple",
                legal=[n for n in (below, below + pieces) if n],
            )
        )
    chunks = torch.arange(seq_len).view(pieces, -1)
    if kind == "ring":
        return torch.cat((chunks[rank], chunks[pieces - 1 - rank]))
    return chunks[rank]


class Ring:
    """Causal attention over a sequence in ring order, as `positions` gives it.

    arXiv:2310.01889, with the balanced order of arXiv:2311.09431 and Llama 3, section 3.3.2. It
    keeps nothing between calls. `block` is for tests; without it the device's fastest serves.
    `recorder` is where this rank enters what it waits for.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        block: BlockAttention | None = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        size = dist.get_world_size(group)
        self.place = _RingPlace(group, dist.get_rank(group), size, recorder or FlightRecorder())
        self.block = block

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Tensor | None = None,
        scores: Scores = ALL_SCORES,
    ) -> Tensor:
        """Return the attention of this rank's queries, of their shape and dtype.

        q `[batch, heads, seq / cp, head_dim]`, k and v `[batch, kv_heads, seq / cp, head_dim]`.
        `segments` int `[batch or 1, seq]`, the whole row in natural order and the same on all
        ranks: a query sees keys of its own segment only.
        """
        assert q.shape[2] % 2 == 0, "the ring holds two chunks on each rank"
        block = self.block or choose(q, masked=segments is not None)
        out: Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, segments, self.place, block
        )
        return out


class Ulysses:
    """Causal attention over a sequence in natural order, by an all-to-all before and after.

    The heads of keys and values must divide among the ranks. arXiv:2309.14509. `core` attends to
    the whole sequence, with what it gets of documents: without one, segments.
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
        scores: Scores = ALL_SCORES,
    ) -> Tensor:
        """Return the attention of this rank's queries; shapes as in `Ring`."""
        assert k.shape[1] % self.size == 0, "each rank gets whole heads of keys"
        q, k, v = _ToHeads.apply(self.group, self.size, q, k, v)  # type: ignore[no-untyped-call]
        out = self.core(q, k, v, documents, scores)
        back: Tensor = _ToPositions.apply(self.group, self.size, out)  # type: ignore[no-untyped-call]
        return back


def _by_mask(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scores: Scores = ALL_SCORES
) -> Tensor:
    return attend(q, k, v, causal_mask(q, segments, None), scores)


class _ToHeads(torch.autograd.Function):
    """Some heads of all positions for all heads of some positions, of several tensors at once."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, size: int, *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.size = group, size
        return _to_heads(given, group, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_positions(grads, ctx.group, ctx.size)


class _ToPositions(torch.autograd.Function):
    """The inverse of `_ToHeads`, and its transpose, of one tensor."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, size: int, given: Tensor) -> Tensor:
        ctx.group, ctx.size = group, size
        return _to_positions((given,), group, size)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_heads((grad,), ctx.group, ctx.size)


# Both have a token's heads together in memory, as the products on both sides do: what is traded is
# copied once before and once after, in rows of several heads.


def _to_heads(given: Sequence[Tensor], group: dist.ProcessGroup, size: int) -> tuple[Tensor, ...]:
    """Return `[batch, heads / size, seq, head_dim]` of each `[batch, heads, seq / size, head_dim]`.

    Rank i gets the i-th share of the heads, from all ranks in their order.
    """
    shares = [_cut(x.transpose(1, 2), 2, size) for x in given]
    sent = torch.cat([share.permute(2, 0, 1, 3, 4) for share in shares], 3)
    received = _trade(sent, group).transpose(0, 1).flatten(1, 2).transpose(1, 2)
    return torch.split(received, [share.shape[3] for share in shares], 1)


def _to_positions(
    given: Sequence[Tensor], group: dist.ProcessGroup, size: int
) -> tuple[Tensor, ...]:
    """Return `[batch, heads, seq / size, head_dim]` of each `[batch, heads / size, seq, head_dim]`.

    Rank i gets the i-th share of the positions, of the heads of all ranks in their order.
    """
    shares = [_cut(x.transpose(1, 2), 1, size) for x in given]
    sent = torch.cat([share.transpose(0, 1) for share in shares], 3)
    received = torch.split(_trade(sent, group), [share.shape[3] for share in shares], 3)
    return tuple(part.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2) for part in received)


def _cut(x: Tensor, dim: int, size: int) -> Tensor:
    """Return x with a dim as two, of which the first has `size`; a view."""
    return x.reshape(*x.shape[:dim], size, -1, *x.shape[dim + 1 :])


def _trade(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return what each rank sends here, stacked; x[i] goes to rank i."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received


@dataclass(frozen=True)
class _RingPlace:
    """This rank's place in a ring."""

    group: dist.ProcessGroup
    rank: int
    size: int
    recorder: FlightRecorder

    def owner(self, step: int) -> int:
        """Return the rank whose keys are here after so many exchanges."""
        return (self.rank - step) % self.size

    def pass_on(self, sent: Tensor, tag: int) -> Callable[[], Tensor]:
        """Start to send a contiguous tensor to the next rank and to get the last one's.

        Returns what waits for it; `sent` must not change before. The tag keeps messages apart that
        are under way at once.
        """
        if self.size == 1:
            return lambda: sent
        received = torch.empty_like(sent)
        after = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        before = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, after, self.group, tag),
                dist.P2POp(dist.irecv, received, before, self.group, tag),
            ]
        )

        pending = Pending(self.recorder, *works)

        def wait() -> Tensor:
            pending.wait()
            return received

        return wait


@dataclass(frozen=True)
class _Piece:
    """What this rank's queries see of one rank's keys: the only part that is computed."""

    queries: slice
    keys: slice
    causal: bool
    mask: Tensor | None


def _piece(place: _RingPlace, owner: int, length: int, segments: Tensor | None) -> _Piece:
    """Return what rank `place.rank` sees of rank `owner`'s keys, `length` of them.

    Of two ranks the lower one's first chunk precedes, and its second chunk follows, both chunks of
    the other. So half of the scores are needed whichever is here. `segments` is in ring order,
    `[batch or 1, cp, length]`.
    """
    everything, half = slice(None), length // 2
    queries, keys, causal = everything, everything, False
    if owner == place.rank:
        causal = True
    elif owner < place.rank:
        keys = slice(0, half)
    else:
        queries = slice(half, None)
    if segments is None:
        return _Piece(queries, keys, causal, None)
    mine, theirs = segments[:, place.rank, queries], segments[:, owner, keys]
    mask = mine[:, None, :, None] == theirs[:, None, None, :]
    return _Piece(queries, keys, causal, mask.tril_() if causal else mask)


def _in_ring_order(segments: Tensor, cp: int) -> Tensor:
    """Return segments `[batch, seq]` as `[batch, cp, seq / cp]`, each rank's in one row."""
    chunks = segments.reshape(segments.shape[0], 2 * cp, -1)
    return torch.cat((chunks[:, :cp], chunks[:, cp:].flip(1)), dim=2)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the attention over more keys into `out` and `lse`, in place.

    Both are means of values, weighted by exp(score): the merged mean weighs them by their exp(lse),
    of which only the ratio is formed. arXiv:2310.01889, section 3.
    """
    share = torch.sigmoid(part_lse - lse)
    out.lerp_(part.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Tensor | None,
        place: _RingPlace,
        block: BlockAttention,
    ) -> Tensor:
        if segments is not None:
            segments = _in_ring_order(segments, place.size)
        kv = torch.stack((k, v))
        out = lse = kv  # both are set in step 0
        for step in range(place.size):
            last = step == place.size - 1
            arrived = None if last else place.pass_on(kv, tag=0)
            piece = _piece(place, place.owner(step), q.shape[2], segments)
            keys, values = kv[:, :, :, piece.keys]
            part, part_lse = block.forward(
                q[:, :, piece.queries], keys, values, piece.mask, piece.causal
            )
            if step == 0:  # its own keys: no query is without one
                # Copies, since a selective recompute keeps what the block gave as it was.
                out = part.to(wide(q.dtype), copy=True)
                lse = part_lse.clone(memory_format=torch.contiguous_format)
            else:
                _merge(out[:, :, piece.queries], lse[:, :, piece.queries], part, part_lse)
            if arrived is not None:
                kv = arrived()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, segments)
        ctx.place, ctx.block = place, block
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, segments = ctx.saved_tensors
        place: _RingPlace = ctx.place
        block: BlockAttention = ctx.block
        kv = torch.stack((k, v))
        grad_q = own_k = own_v = q  # set in step 0
        sums: Callable[[], Tensor] | None = None
        for step in range(place.size):
            last = step == place.size - 1
            arrived = None if last else place.pass_on(kv, tag=0)
            piece = _piece(place, place.owner(step), q.shape[2], segments)
            keys, values = kv[:, :, :, piece.keys]
            parts = block.backward(
                grad[:, :, piece.queries],
                q[:, :, piece.queries],
                keys,
                values,
                out[:, :, piece.queries],
                lse[:, :, piece.queries],
                piece.mask,
                piece.causal,
            )
            if step == 0:  # what its own queries give its keys stays
                grad_q, own_k, own_v = (part.to(wide(q.dtype)) for part in parts)
            else:
                grad_q[:, :, piece.queries] += parts[0]
                # The sum of the other ranks' follows the keys, one step behind.
                total = torch.zeros_like(kv, dtype=wide(q.dtype)) if sums is None else sums()
                total[0, :, :, piece.keys] += parts[1]
                total[1, :, :, piece.keys] += parts[2]
                sums = place.pass_on(total, tag=1)
            if arrived is not None:
                kv = arrived()
        if sums is not None:
            back = sums()
            own_k += back[0]
            own_v += back[1]
        grads = (one.to(q.dtype) for one in (grad_q, own_k, own_v))
        return *grads, None, None, None
