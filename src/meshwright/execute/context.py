"""Context parallelism: attention over a sequence that is cut between the ranks of a group.

`Ring` and `Ulysses` stand in for `Attention.core`. Each rank holds the positions that `positions`
lists, of q, k and v alike. `Ring` passes keys and values round and merges what each block gives;
`Ulysses` trades positions for heads, and attends to the whole sequence with a share of the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.errors import ConfigError, refusal
from meshwright.execute.block_attention import BlockAttention, Grads, choose, visible, wide
from meshwright.execute.flight_recorder import FlightRecorder, Pending
from meshwright.models.attention import Core, attend
from meshwright.models.context import causal_mask
from meshwright.program.attention import UNBOUNDED, ScoreBounds
from meshwright.program.ring import ring_pieces


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
        scores: ScoreBounds = UNBOUNDED,
    ) -> Tensor:
        """Return the attention of this rank's queries, of their shape and dtype.

        q `[batch, heads, seq / cp, head_dim]`, k and v `[batch, kv_heads, seq / cp, head_dim]`.
        `segments` int `[batch or 1, seq]`, the whole row in natural order and the same on all
        ranks: a query sees keys of its own segment only.
        """
        assert q.shape[2] % 2 == 0, "the ring holds two chunks on each rank"
        assert self.block is None or scores.cap is None, "a block of one's own knows no cap"
        blocks = [self.block or choose(q, masked, scores.cap) for masked in (False, True)]
        work = _RingWork(self.place, scores, *blocks)
        out: Tensor = _RingAttention.apply(q, k, v, segments, work)  # type: ignore[no-untyped-call]
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
        scores: ScoreBounds = UNBOUNDED,
    ) -> Tensor:
        """Return the attention of this rank's queries; shapes as in `Ring`."""
        assert k.shape[1] % self.size == 0, "each rank gets whole heads of keys"
        q, k, v = _ToHeads.apply(self.group, self.size, q, k, v)  # type: ignore[no-untyped-call]
        out = self.core(q, k, v, documents, scores)
        back: Tensor = _ToPositions.apply(self.group, self.size, out)  # type: ignore[no-untyped-call]
        return back


def _by_mask(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scores: ScoreBounds = UNBOUNDED
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
class _RingWork:
    """What a call of the ring computes, and by which blocks: without a mask, and with one."""

    place: _RingPlace
    scores: ScoreBounds
    bare: BlockAttention
    masked: BlockAttention

    def pieces(self, step: int, q: Tensor, segments: Tensor | None) -> Iterator[_Piece]:
        """Yield what this rank's queries see of the keys that are here in a step.

        `segments` is in ring order, `[batch or 1, cp, length]`.
        """
        place = self.place
        owner = place.owner(step)
        for piece in ring_pieces(q.shape[2], place.size, place.rank, owner, self.scores):
            mask = visible(piece, self.scores.window, q.device) if piece.masked else None
            if segments is not None:
                mine = segments[:, place.rank, piece.queries]
                theirs = segments[:, owner, piece.keys]
                same = mine[:, None, :, None] == theirs[:, None, None, :]
                if mask is not None:
                    same &= mask
                elif piece.causal:
                    same.tril_()
                mask = same
            block = self.bare if mask is None else self.masked
            yield _Piece(block, piece.queries, piece.keys, piece.causal, mask)


class _Piece(NamedTuple):
    """Some of this rank's queries and some keys of one rank, and how they are computed."""

    block: BlockAttention
    queries: slice
    keys: slice
    causal: bool
    mask: Tensor | None

    def forward(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention of its queries over its keys, and the log-sum-exp."""
        keys, values = kv[:, :, :, self.keys]
        return self.block.forward(q[:, :, self.queries], keys, values, self.mask, self.causal)

    def backward(self, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor) -> Grads:
        """Return the gradients of its queries, keys and values."""
        keys, values = kv[:, :, :, self.keys]
        at = self.queries
        mine = (grad[:, :, at], q[:, :, at], keys, values, out[:, :, at], lse[:, :, at])
        return self.block.backward(*mine, self.mask, self.causal)


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
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, work: _RingWork
    ) -> Tensor:
        place = work.place
        if segments is not None:
            segments = _in_ring_order(segments, place.size)
        kv = torch.stack((k, v))
        begun: tuple[Tensor, Tensor] | None = None  # the result and its log-sum-exp
        for step in range(place.size):
            last = step == place.size - 1
            arrived = None if last else place.pass_on(kv, tag=0)
            for piece in work.pieces(step, q, segments):
                part, part_lse = piece.forward(q, kv)
                if begun is None and part.shape == q.shape:
                    # Copies, since a selective recompute keeps what the block gave as it was.
                    lse = part_lse.clone(memory_format=torch.contiguous_format)
                    begun = part.to(wide(q.dtype), copy=True), lse
                    continue
                begun = begun or _unseen(q)
                out, lse = (x[:, :, piece.queries] for x in begun)
                _merge(out, lse, part, part_lse)
            if arrived is not None:
                kv = arrived()
        assert begun is not None, "a query sees its own key"
        out, lse = begun[0].to(q.dtype), begun[1]
        ctx.save_for_backward(q, k, v, out, lse, segments)
        ctx.work = work
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, segments = ctx.saved_tensors
        work: _RingWork = ctx.work
        place = work.place
        kv = torch.stack((k, v))
        own: tuple[Tensor, ...] = ()  # set in step 0: of its queries, and what these give its keys
        sums: Callable[[], Tensor] | None = None
        for step in range(place.size):
            last = step == place.size - 1
            arrived = None if last else place.pass_on(kv, tag=0)
            # The sum of what the others' queries give keys follows them, one step behind.
            total: Tensor | None = None
            for piece in work.pieces(step, q, segments):
                parts = piece.backward(grad, q, kv, out, lse)
                if not own and parts[0].shape == q.shape:
                    own = tuple(part.to(wide(q.dtype)) for part in parts)
                    continue
                own = own or tuple(torch.zeros_like(x, dtype=wide(q.dtype)) for x in (q, k, v))
                if step and total is None:
                    total = _total(sums, kv)
                at = (own[1], own[2]) if total is None else (total[0], total[1])
                own[0][:, :, piece.queries] += parts[0]
                at[0][:, :, piece.keys] += parts[1]
                at[1][:, :, piece.keys] += parts[2]
            if step:
                sums = place.pass_on(_total(sums, kv) if total is None else total, tag=1)
            if arrived is not None:
                kv = arrived()
        if sums is not None:
            back = sums()
            own[1].add_(back[0])
            own[2].add_(back[1])
        return *(one.to(q.dtype) for one in own), None, None


def _unseen(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention of queries over no keys, and its log-sum-exp, to merge others into."""
    batch, heads, tokens, dim = q.shape
    out = q.new_zeros(batch, tokens, heads, dim, dtype=wide(q.dtype)).transpose(1, 2)
    return out, out.new_full(q.shape[:3], -torch.inf)


def _total(sums: Callable[[], Tensor] | None, kv: Tensor) -> Tensor:
    """Return the gradients of keys and values that have arrived with them, or zeros."""
    return torch.zeros_like(kv, dtype=wide(kv.dtype)) if sums is None else sums()
