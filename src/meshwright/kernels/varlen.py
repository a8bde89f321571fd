"""Attention within each document of packed sequences, without a mask.

A mask `[batch, 1, seq, seq]` needs memory quadratic in the length in each layer, computes the whole
square of scores instead of the half below the diagonal, and rules out the fastest kernels. Here,
each document is a causal sequence. A CPU makes one kernel call per document, or a few if a window
is shorter or scores are capped; a GPU makes one call for all documents: FlashAttention's varlen
kernel, or FlexAttention for fp32, capped scores and sinks.

`bounds` has the start and end positions of documents, int32 `[batch, n + 1]`, ascending: document i
of a sequence spans `bounds[row, i]` to `bounds[row, i + 1]`; sequences with fewer documents end
with empty ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from meshwright.kernels.block_attention import (
    BlockAttention,
    Grads,
    VisibleKeys,
    choose,
    has_cuda_flash,
    visible,
    wide,
)
from meshwright.kernels.flex_blocks import flex_block_attention, seen
from meshwright.models import flex
from meshwright.models.attention import attend
from meshwright.models.blockwise import by_token
from meshwright.models.sinks import merge_sinks, sink_gradient
from meshwright.program.attention import UNBOUNDED, ScoreBounds
from meshwright.program.ring import Piece, causal_pieces

# Few different sizes, since compiled code is made anew for each.
_MULTIPLE: Final = 8

_HAS_WORD: Final = torch.__version__ >= (2, 12)  # type: ignore[operator]
_QKV: Final = "Tensor query, Tensor key, Tensor value"
_SCORES: Final = "int? window=None, float? cap=None"
_SINKS: Final = "Tensor? sinks=None"


def bounds_of(segments: Tensor) -> Tensor:
    """Return the document bounds, int32 `[batch, n + 1]`, of segment numbers on the CPU, int
    `[batch, seq]`.

    Adjacent tokens with equal numbers belong to one document.
    """
    rows, seq = segments.shape
    begins = torch.ones(rows, seq, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    counts = begins.sum(1)
    width = -(-int(counts.max()) // _MULTIPLE) * _MULTIPLE
    bounds = torch.full((rows, width + 1), seq, dtype=torch.int32)
    row, position = begins.nonzero(as_tuple=True)
    nth = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    bounds[row, nth] = position.to(torch.int32)
    return bounds


def takes_bounds(
    device: torch.device, dtype: torch.dtype, head_dim: int, scores: ScoreBounds = UNBOUNDED
) -> bool:
    """Whether attention on a device takes document bounds; otherwise it needs a mask."""
    kind = device, dtype, head_dim
    return device.type == "cpu" or _takes_varlen(*kind, scores) or flex.takes(*kind)


def _takes_varlen(
    device: torch.device, dtype: torch.dtype, head_dim: int, scores: ScoreBounds
) -> bool:
    """Whether FlashAttention's varlen kernel supports this case: neither soft caps nor sinks."""
    is_known = scores.cap is None and not scores.sinks
    return is_known and has_cuda_flash(device, dtype, head_dim)


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    scores: ScoreBounds = UNBOUNDED,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention within documents, or within whole sequences if `bounds` is None.

    q is `[batch, heads, seq, head_dim]`, k and v `[batch, kv_heads, seq, head_dim]`, sinks
    `[heads]`. A bool `bounds` is a mask instead.
    """
    if bounds is None or bounds.dtype == torch.bool:
        return attend(q, k, v, bounds, scores, sinks)
    window, cap, _ = scores
    if _takes_varlen(q.device, q.dtype, q.shape[-1], scores):
        return _by_varlen(q, k, v, bounds, window)
    out: Tensor = torch.ops.meshwright.attend_varlen(q, k, v, bounds, window, cap, sinks)[0]
    return out


def _by_varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int | None = None
) -> Tensor:
    """Return the attention of all documents from one call of FlashAttention; arXiv:2307.08691.

    The sequences are concatenated. The host need not know how long documents are.
    """
    from torch.nn.attention.varlen import varlen_attn

    batch, _, seq, _ = q.shape
    first = torch.arange(0, batch * seq, seq, dtype=torch.int32, device=q.device)
    begins = (bounds[:, :-1] + first[:, None]).flatten()
    begins = torch.nn.functional.pad(begins, (0, 1), value=batch * seq)
    # torch 2.11 has no word for it, and no check: the kernel takes fewer heads of keys by itself.
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if _HAS_WORD else {}
    rows, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    ends: Any = (begins, begins, seq, seq)
    before = -1 if window is None else window - 1  # -1: all
    out: Any = varlen_attn(rows, keys, values, *ends, window_size=(before, 0), **options)
    attended: Tensor = out.unflatten(0, (batch, seq)).transpose(1, 2)
    return attended


def _documents(bounds: Tensor, seq: int) -> Iterator[tuple[slice, slice]]:
    """Yield the sequence and position slices of each document; one for all sequences if each is one
    document."""
    rows = bounds.tolist()
    if all(row[1] == seq for row in rows):
        yield slice(None), slice(None)
        return
    for index, row in enumerate(rows):
        for begin, end in pairwise(row):
            if end > begin:
                yield slice(index, index + 1), slice(begin, end)


# One operation, so that compiled code and selective recomputation see one.
@torch.library.custom_op(
    "meshwright::attend_varlen",
    mutates_args=(),
    device_types="cpu",
    schema=f"({_QKV}, Tensor bounds, {_SCORES}, {_SINKS}) -> (Tensor, Tensor)",
)
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention and its log-sum-exp `[batch, heads, seq]`."""
    out, sums = _empty(query, key, value, bounds, window, cap)
    scores = ScoreBounds(window, cap)
    bare, masked = (choose(query, is_masked, cap) for is_masked in (False, True))
    for rows, positions in _documents(bounds, query.shape[2]):
        q, k, v = (x[rows, :, positions] for x in (query, key, value))
        pieces = causal_pieces(q.shape[2], scores)
        if len(pieces) == 1 and not pieces[0].masked:
            part, part_sums = bare.forward(q, k, v, None, True)
            out[rows, :, positions], sums[rows, :, positions] = part, part_sums
            continue
        into, into_sums = out[rows, :, positions], sums[rows, :, positions]
        for piece in pieces:
            queries, keys, mask = piece.queries, piece.keys, _mask(piece, window, q)
            block = bare if mask is None else masked
            result = block.forward(
                q[:, :, queries], k[:, :, keys], v[:, :, keys], mask, piece.causal
            )
            into[:, :, queries], into_sums[:, :, queries] = result
    if sinks is not None:
        merge_sinks(out, sums, sinks)
    return out, sums


@_forward.register_kernel("cuda")
def _forward_by_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of `_forward` by one call for all documents; the host does not wait for
    their lengths."""
    block = flex_block_attention(cap)
    out, sums = block.forward(query, key, value, _seen(bounds, query.shape[2], window), True)
    if sinks is not None:
        merge_sinks(out, sums, sinks)
    return out, sums


def _seen(bounds: Tensor, seq: int, window: int | None) -> VisibleKeys:
    """Return which keys each query sees: earlier ones of the same document, within the window."""
    positions = torch.arange(seq, dtype=torch.int32, device=bounds.device)
    # Empty documents begin at the end of the row, so they have no place.
    rows = positions.expand(len(bounds), -1).contiguous()
    document_of = torch.searchsorted(bounds, rows, right=True, out_int32=True)
    return seen((positions, positions), (document_of, document_of), window)


def _mask(piece: Piece, window: int | None, q: Tensor) -> Tensor | None:
    return visible(piece, window, q.device) if piece.masked else None


@_forward.register_fake
def _empty(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return by_token(query), query.new_empty(query.shape[:3], dtype=wide(query.dtype))


@torch.library.custom_op(
    "meshwright::attend_varlen_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor grad, {_QKV}, Tensor out, Tensor sums, Tensor bounds, {_SCORES})"
    " -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor,
    window: int | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    grads = (by_token(query), by_token(key), by_token(value))
    scores = ScoreBounds(window, cap)
    blocks = choose(query, False, cap), choose(query, True, cap)
    for rows, positions in _documents(bounds, query.shape[2]):
        operands = [x[rows, :, positions] for x in (grad, query, key, value, out, sums)]
        pieces = causal_pieces(operands[1].shape[2], scores)
        if len(pieces) == 1 and not pieces[0].masked:
            g, q, k, v, o, lse = operands
            parts = blocks[0].backward(g, q, k, v, o, lse, None, True)
        else:
            parts = _summed(operands, pieces, window, *blocks)
        for target, part in zip(grads, parts, strict=True):
            target[rows, :, positions] = part
    return grads


@_backward.register_kernel("cuda")
def _backward_by_flex(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor,
    window: int | None = None,
    cap: float | None = None,
) -> Grads:
    sees = _seen(bounds, query.shape[2], window)
    grads = flex_block_attention(cap).backward(grad, query, key, value, out, sums, sees, True)
    # Compiled code checks that strides are those of `_empty_grads`.
    q_grad, k_grad, v_grad = (by_token(gradient).copy_(gradient) for gradient in grads)
    return q_grad, k_grad, v_grad


def _summed(
    tensors: list[Tensor],
    pieces: tuple[Piece, ...],
    window: int | None,
    bare: BlockAttention,
    masked: BlockAttention,
) -> Grads:
    """Return the gradients of a document's queries, keys and values, in fp32 at least.

    `tensors` are the result's gradient, q, k, v, the result and its log-sum-exp.
    """
    grad, q, k, v, out, sums = tensors
    q_grad, k_grad, v_grad = (torch.zeros_like(x, dtype=wide(x.dtype)) for x in (q, k, v))
    for piece in pieces:
        queries, keys, mask = piece.queries, piece.keys, _mask(piece, window, q)
        block = bare if mask is None else masked
        operands = (grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys])
        parts = block.backward(
            *operands, out[:, :, queries], sums[:, :, queries], mask, piece.causal
        )
        q_grad[:, :, queries] = parts[0]
        k_grad[:, :, keys] += parts[1]
        v_grad[:, :, keys] += parts[2]
    return q_grad, k_grad, v_grad


@_backward.register_fake
def _empty_grads(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor,
    window: int | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return by_token(query), by_token(key), by_token(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, bounds, window, cap, sinks = inputs
    ctx.save_for_backward(*qkv, *output, bounds, sinks)
    ctx.scores = window, cap


def _differentiate(ctx: Any, grad: Tensor, grad_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, sinks = ctx.saved_tensors
    *_, out, sums, _ = tensors
    to_sinks = None if sinks is None else sink_gradient(grad, out, sums, sinks)
    grads = torch.ops.meshwright.attend_varlen_backward(grad, *tensors, *ctx.scores)
    return *grads, None, None, None, to_sinks


_forward.register_autograd(_differentiate, setup_context=_keep)
