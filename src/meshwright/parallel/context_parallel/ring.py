"""Ring attention on one rank: passes keys and values on, and merges the results of blocks.

`attend_round` and `differentiate_round` are the forward and backward of `context.Ring`. In compiled
code, each of them is one operator, because the compiler doesn't support point-to-point transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.flight_recorder import FlightRecorder, Pending
from meshwright.kernels import flex_blocks as flex
from meshwright.kernels.block_attention import (
    BlockAttention,
    Grads,
    Mask,
    choose,
    visible,
    wide,
)
from meshwright.models.blockwise import by_token
from meshwright.models.sinks import merge_sinks
from meshwright.program.attention import ScoreBounds
from meshwright.program.ring import ring_pieces, whole_piece

_QKV: Final = "Tensor query, Tensor key, Tensor value"
_WORK: Final = "Tensor? segments, int? window, float? cap, str ring"


@dataclass(frozen=True)
class RingPlace:
    """This rank's position in a ring of ranks, with its process group."""

    group: dist.ProcessGroup
    rank: int
    size: int
    recorder: FlightRecorder

    def owner(self, step: int) -> int:
        """Return the rank whose keys and values are on this rank after `step` exchanges."""
        return (self.rank - step) % self.size

    def pass_on(self, sent: Tensor, tag: int) -> Callable[[], Tensor]:
        """Start to send a contiguous tensor to the next rank and receive from the previous one.

        Returns a function that waits and returns the received tensor; `sent` must not change
        before. The `tag` separates messages that are in flight at the same time.
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

        pending, in_flight = Pending(self.recorder, *works), [sent]

        def wait() -> Tensor:
            pending.wait()
            in_flight.clear()  # until then its memory may not be given to others
            return received

        return wait


@dataclass(frozen=True)
class RingWork:
    """The fixed arguments of a ring attention call, and its kernels without and with a mask.

    With `is_whole`, each step computes all visible queries and keys as one piece, whose mask is a
    FlexAttention one (`VisibleKeys`).
    """

    place: RingPlace
    scores: ScoreBounds
    bare: BlockAttention
    masked: BlockAttention
    is_whole: bool = False

    @classmethod
    def of(
        cls, place: RingPlace, q: Tensor, segments: Tensor | None, scores: ScoreBounds
    ) -> RingWork:
        """Return the arguments with the fastest kernels for q's device."""
        scores = scores.within(q.shape[2] * place.size)
        if flex.takes(q, segments, scores):
            block = flex.flex_block_attention(scores.cap)
            return cls(place, scores, block, block, is_whole=True)
        return cls(place, scores, choose(q, False, scores.cap), choose(q, True, scores.cap))

    def pieces(self, step: int, q: Tensor, segments: Tensor | None) -> Iterator[_Piece]:
        """Yield the pieces of attention between this rank's queries and the keys present in a step.

        `segments` is in ring order, `[batch or 1, cp, length]`; None: one document per sequence.
        """
        place = self.place
        owner = place.owner(step)
        if self.is_whole:
            yield from self._whole(owner, q, segments)
            return
        for piece in ring_pieces(q.shape[2], place.size, place.rank, owner, self.scores):
            mask = visible(piece, self.scores.window, q.device) if piece.masked else None
            if segments is not None:
                query_segments = segments[:, place.rank, piece.queries]
                key_segments = segments[:, owner, piece.keys]
                same = query_segments[:, None, :, None] == key_segments[:, None, None, :]
                if mask is not None:
                    same &= mask
                elif piece.causal:
                    same.tril_()
                mask = same
            block = self.bare if mask is None else self.masked
            yield _Piece(block, piece.queries, piece.keys, piece.causal, mask)

    def _whole(self, owner: int, q: Tensor, segments: Tensor | None) -> Iterator[_Piece]:
        rank, size, length = self.place.rank, self.place.size, q.shape[2]
        piece = whole_piece(length, size, rank, owner, self.scores)
        if piece is None:
            return
        positions = [_at(holder, size, length, q.device) for holder in (rank, owner)]
        pair_segments = None
        if segments is not None:
            pair_segments = segments[:, rank, piece.queries], segments[:, owner, piece.keys]
        sees = flex.seen(
            (positions[0][piece.queries], positions[1][piece.keys]),
            pair_segments,
            self.scores.window,
        )
        yield _Piece(self.masked, piece.queries, piece.keys, piece.causal, sees)


def _at(rank: int, size: int, length: int, device: torch.device) -> Tensor:
    """Return the positions that a rank of the ring has, int32 `[length]`."""
    chunk = length // 2
    positions = torch.arange(length, dtype=torch.int32, device=device)
    later = (2 * size - 2 - rank) * chunk  # chunk 2 size - 1 - rank, which is the second here
    return positions + torch.where(positions < chunk, rank * chunk, later)


class _Piece(NamedTuple):
    """A slice of this rank's queries and of one rank's keys, with the kernel and mask to use."""

    block: BlockAttention
    queries: slice
    keys: slice
    causal: bool
    mask: Mask | None

    def forward(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention of the piece's queries over its keys, and the log-sum-exp."""
        keys, values = kv[:, :, :, self.keys]
        return self.block.forward(q[:, :, self.queries], keys, values, self.mask, self.causal)

    def backward(self, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor) -> Grads:
        """Return the gradients of the piece's queries, keys and values."""
        keys, values = kv[:, :, :, self.keys]
        queries = self.queries
        operands = (
            grad[:, :, queries],
            q[:, :, queries],
            keys,
            values,
            out[:, :, queries],
            lse[:, :, queries],
        )
        return self.block.backward(*operands, self.mask, self.causal)


def in_ring_order(segments: Tensor, cp: int) -> Tensor:
    """Return segments `[batch, seq]` as `[batch, cp, seq / cp]`, one row per rank."""
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


def attend_round(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    work: RingWork,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention over the keys of all ranks and the sinks, and its log-sum-exp.

    Shapes as in `Ring`; `segments` from `in_ring_order`.
    """
    place, kv = work.place, torch.stack((k, v))
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
    if sinks is not None:  # once: it is not a key of any rank
        merge_sinks(*begun, sinks)
    return begun[0].to(q.dtype), begun[1]


def differentiate_round(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor | None,
    work: RingWork,
) -> Grads:
    """Return the gradients of this rank's queries, keys and values.

    `grad` is the gradient of `out`; the other arguments are those and the results of
    `attend_round`.
    """
    place, kv = work.place, torch.stack((k, v))
    grads: tuple[Tensor, ...] = ()  # set in step 0: of its queries, and what these give its keys
    sums: Callable[[], Tensor] | None = None
    for step in range(place.size):
        last = step == place.size - 1
        arrived = None if last else place.pass_on(kv, tag=0)
        # The sum of what the others' queries give keys follows them, one step behind.
        total: Tensor | None = None
        for piece in work.pieces(step, q, segments):
            parts = piece.backward(grad, q, kv, out, lse)
            if not grads and parts[0].shape == q.shape:
                grads = tuple(part.to(wide(q.dtype)) for part in parts)
                continue
            grads = grads or tuple(torch.zeros_like(x, dtype=wide(q.dtype)) for x in (q, k, v))
            if step and total is None:
                total = _total(sums, kv)
            kv_grads = (grads[1], grads[2]) if total is None else (total[0], total[1])
            grads[0][:, :, piece.queries] += parts[0]
            kv_grads[0][:, :, piece.keys] += parts[1]
            kv_grads[1][:, :, piece.keys] += parts[2]
        if step:
            sums = place.pass_on(_total(sums, kv) if total is None else total, tag=1)
        if arrived is not None:
            kv = arrived()
    if sums is not None:
        back = sums()
        grads[1].add_(back[0])
        grads[2].add_(back[1])
    q_grad, k_grad, v_grad = (gradient.to(q.dtype) for gradient in grads)
    return q_grad, k_grad, v_grad


def _unseen(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over no keys (zeros) and its log-sum-exp (-inf), to merge results into."""
    batch, heads, tokens, dim = q.shape
    out = q.new_zeros(batch, tokens, heads, dim, dtype=wide(q.dtype)).transpose(1, 2)
    return out, out.new_full(q.shape[:3], -torch.inf)


def _total(sums: Callable[[], Tensor] | None, kv: Tensor) -> Tensor:
    """Return the gradients of keys and values received from the previous rank, or zeros."""
    return torch.zeros_like(kv, dtype=wide(kv.dtype)) if sums is None else sums()


@cache
def _places() -> WeakValueDictionary[str, RingPlace]:
    """Return the registry of this process's rings by group name, since operators take only
    names.
    """
    return WeakValueDictionary()


def enrol(place: RingPlace) -> str:
    """Register a ring for use in compiled operators, and return its name."""
    _places()[place.group.group_name] = place
    return place.group.group_name


def compiled_ring(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scores: ScoreBounds, ring: str
) -> Tensor:
    """Return ring attention as one differentiable operator; arguments as for `context.Ring`."""
    out: Tensor = torch.ops.meshwright.ring_attention(
        q, k, v, segments, scores.window, scores.cap, ring
    )[0]
    return out


@torch.library.custom_op(
    "meshwright::ring_attention",
    mutates_args=(),
    schema=f"({_QKV}, {_WORK}) -> (Tensor, Tensor)",
)
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor | None,
    window: int | None,
    cap: float | None,
    ring: str,
) -> tuple[Tensor, Tensor]:
    work, order = _work(query, segments, ScoreBounds(window, cap), ring)
    out, lse = attend_round(query, key, value, order, work)
    return by_token(query).copy_(out), lse.contiguous()


@_forward.register_fake
def _empty(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return by_token(query), query.new_empty(query.shape[:3], dtype=wide(query.dtype))


@torch.library.custom_op(
    "meshwright::ring_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_QKV}, Tensor out, Tensor sums, {_WORK}) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    segments: Tensor | None,
    window: int | None,
    cap: float | None,
    ring: str,
) -> Grads:
    work, order = _work(query, segments, ScoreBounds(window, cap), ring)
    grads = differentiate_round(grad, query, key, value, out, sums, order, work)
    q_grad, k_grad, v_grad = map(torch.Tensor.contiguous, grads)
    return q_grad, k_grad, v_grad


@_backward.register_fake
def _empty_grads(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Grads:
    q_grad, k_grad, v_grad = (x.new_empty(x.shape) for x in (query, key, value))
    return q_grad, k_grad, v_grad


def _work(
    q: Tensor, segments: Tensor | None, scores: ScoreBounds, ring: str
) -> tuple[RingWork, Tensor | None]:
    place = _places()[ring]
    order = None if segments is None else in_ring_order(segments, place.size)
    return RingWork.of(place, q, segments, scores), order


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, segments, window, cap, ring = inputs
    ctx.save_for_backward(*qkv, *output, segments)
    ctx.more = window, cap, ring


def _differentiate(ctx: Any, grad: Tensor, grad_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = torch.ops.meshwright.ring_attention_backward(grad, *ctx.saved_tensors, *ctx.more)
    return *grads, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
