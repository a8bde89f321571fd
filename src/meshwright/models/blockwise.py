"""Causal attention on a CPU by blocks of matmuls, forward and backward.

PyTorch's CPU kernel (`_scaled_dot_product_flash_attention_for_cpu`) works head by head, with
matmuls too small to be fast. Here a block has the queries of several heads and sequences at once:
its scores stay in the cache of a CPU core, and each matmul is one batched call. The queries of the
heads that share a key head are rows of one matrix, token by token, so that the queries after a key
are one slice. The backward needs what the kernel's backward needs: q, k, v, the result and the
log-sum-exp. arXiv:2205.14135, algorithms 1 and 4, with all keys of a query, or all queries of a
key, in one block; with a sliding window (arXiv:2004.05150, section 3.1), only those within it.
Exponentials are powers of two, which PyTorch computes faster on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from meshwright.models.planned_cut import LN_2, FactorMemory, Hidden, PlannedCut, shaped
from meshwright.models.sinks import merge_sinks, sink_gradient
from meshwright.program.attention import BLOCK, UNBOUNDED, ScoreBounds, by_blocks

# Where torch.ops has the two operators.
SPACE: Final = "meshwright"
_PRECISIONS: Final = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def takes(q: Tensor, k: Tensor, scores: ScoreBounds = UNBOUNDED) -> bool:
    """Whether `attention` supports this call and is faster than PyTorch's kernel; shapes as there.

    It takes bf16 and fp32 on a CPU, for the sizes that `program.attention.by_blocks` accepts.
    """
    precision = _PRECISIONS.get(q.dtype, "")
    if q.device.type != "cpu" or q.shape[-2] != k.shape[-2]:
        return False
    return by_blocks(q.shape[1], k.shape[1], q.shape[-2], precision, scores)


@torch.library.custom_op(
    f"{SPACE}::attention",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor query, Tensor key, Tensor value, int window=0, float cap=0.0,"
    " Tensor? sinks=None) -> (Tensor, Tensor)",
)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return causal attention and the base-2 log-sum-exp of its scores.

    query `[batch, heads, seq, head_dim]`, key and value `[batch, kv_heads, seq, head_dim]`, fp32 or
    bf16. The result has the shape and dtype of query, contiguous as `[batch, seq, heads,
    head_dim]`; the log-sum-exp is fp32 `[batch, heads, seq]`. Scores are fp32; their exponentials
    are rounded to the input's dtype before the matmul with values, as in PyTorch's kernel. `window`
    and `cap` are those of `ScoreBounds`, 0 for none; sinks `[heads]`.
    """
    cut = PlannedCut.of_call(query, key, window, cap)
    out, lse = by_token(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    queries, keys = cut.queries(), cut.keys()
    values = cut.keys(dtype=query.dtype)
    tops, totals = cut.queries(1), cut.queries(1)
    blocks = _query_blocks(cut, queries, keys, values, tops, totals)
    spread, back, sums = cut.by_key(query), cut.by_key(out), cut.by_key(lse.unsqueeze(-1))
    for part in cut.parts(*key.shape[:2]):
        cut.as_queries(queries).copy_(spread[part])
        cut.as_keys(keys).copy_(key[part])
        cut.as_keys(values).copy_(value[part])
        into = back[part]
        for block in blocks:
            block(into)
        sums[part] = cut.as_queries(totals.log2_().add_(tops))
    if sinks is not None:
        merge_sinks(out, lse.mul_(LN_2), sinks)
        lse.div_(LN_2)
    return out, lse


@torch.library.custom_op(f"{SPACE}::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    window: int = 0,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given that of the result, `grad`.

    `out` and `lse` are the results of `attention`; the other arguments are those of its call.
    """
    cut = PlannedCut.of_call(query, key, window, cap)
    q_grad, k_grad, v_grad = by_token(query), by_token(key), by_token(value)
    queries, incoming = (FactorMemory.of(cut.queries, query.dtype) for _ in range(2))
    keys, values = (FactorMemory.of(cut.keys, query.dtype) for _ in range(2))
    total, sums, deltas = cut.queries(), cut.queries(1), cut.queries(1)
    blocks = _key_blocks(cut, queries, incoming, keys, values, total, sums, deltas)
    spread, grads, outs = (cut.by_key(x) for x in (query, grad, out))
    saved_lse, back = cut.by_key(lse.unsqueeze(-1)), cut.by_key(q_grad)
    for part in cut.parts(*key.shape[:2]):
        queries.fill(cut.as_queries, spread[part])
        incoming.fill(cut.as_queries, grads[part])
        keys.fill(cut.as_keys, key[part])
        values.fill(cut.as_keys, value[part])
        torch.mul(cut.as_queries(incoming.wide), outs[part], out=cut.as_queries(total))
        torch.sum(total, -1, keepdim=True, out=deltas)
        cut.as_queries(sums).copy_(saved_lse[part])
        to_keys, to_values = k_grad[part], v_grad[part]
        for block in blocks:
            block(to_keys, to_values)
        torch.mul(cut.as_queries(total), cut.scale, out=back[part])
    return q_grad, k_grad, v_grad


def _query_blocks(
    cut: PlannedCut, queries: Tensor, keys: Tensor, values: Tensor, tops: Tensor, totals: Tensor
) -> list[Callable[[Tensor], None]]:
    """Return functions that each compute the output of one block of queries."""
    scores = FactorMemory.of(cut.room, values.dtype)
    results = torch.empty(queries[:, : BLOCK * cut.shared].shape, dtype=values.dtype).flatten()
    hidden = Hidden.of(cut)

    def block(tokens: slice) -> Callable[[Tensor], None]:
        rows, seen = cut.of_tokens(tokens), cut.seen_by(tokens)
        q, k, v = queries[:, rows], keys[:, seen].transpose(1, 2), values[:, seen]
        top, total = tops[:, rows], totals[:, rows]
        wide, shares = scores.shaped(*q.shape[:2], k.shape[2])
        corners = hidden.corners(wide.transpose(1, 2), seen, tokens)
        mixed = shaped(results, *q.shape)
        ratio = cut.as_queries(mixed), cut.as_queries(total)

        def run(into: Tensor) -> None:
            torch.baddbmm(wide, q, k, beta=0, alpha=cut.factor, out=wide)
            if cut.cap:
                wide.tanh_().mul_(cut.cap)
            for corner, minus in corners:
                corner.add_(minus)
            torch.amax(wide, -1, keepdim=True, out=top)
            torch.sum(wide.sub_(top).exp2_(), -1, keepdim=True, out=total)
            if shares is not wide:
                shares.copy_(wide)
            torch.bmm(shares, v, out=mixed)
            torch.div(*ratio, out=into[:, :, tokens])

        return run

    return [block(tokens) for tokens in cut.blocks()]


def _key_blocks(
    cut: PlannedCut,
    queries: FactorMemory,
    incoming: FactorMemory,
    keys: FactorMemory,
    values: FactorMemory,
    total: Tensor,
    sums: Tensor,
    deltas: Tensor,
) -> list[Callable[[Tensor, Tensor], None]]:
    """Return functions that differentiate one block of keys each, adding to the query gradients."""
    dtype = queries.narrow.dtype
    first, second = (FactorMemory.of(cut.room, dtype) for _ in range(2))
    third = cut.room() if cut.cap else None
    grads = torch.empty(keys.narrow[:, :BLOCK].shape, dtype=dtype).flatten()
    parts = torch.empty(queries.narrow[:, : cut.span * cut.shared].shape, dtype=dtype).flatten()
    hidden = Hidden.of(cut)

    def block(tokens: slice) -> Callable[[Tensor, Tensor], None]:
        seeing = cut.seeing(tokens)
        rows = cut.of_tokens(seeing)
        k, v = keys.wide[:, tokens], values.wide[:, tokens]
        q, g = queries.wide[:, rows].transpose(1, 2), incoming.wide[:, rows].transpose(1, 2)
        own_k, own_q = keys.narrow[:, tokens], queries.narrow[:, rows]
        own_g = incoming.narrow[:, rows]
        shape = (*k.shape[:2], q.shape[2])
        (shares, own_shares), (scores, own_scores) = first.shaped(*shape), second.shaped(*shape)
        slopes = None if third is None else shaped(third, *shape)
        corners = hidden.corners(shares, tokens, seeing)
        sum_, delta = sums[:, rows].transpose(1, 2), deltas[:, rows].transpose(1, 2)
        mixed, back = shaped(grads, *k.shape), shaped(parts, *own_q.shape)
        result, add = cut.as_keys(mixed), cut.adding(back, total, tokens)

        def run(to_keys: Tensor, to_values: Tensor) -> None:
            torch.baddbmm(shares, k, q, beta=0, alpha=cut.factor, out=shares)
            if slopes is not None:
                torch.square(shares.tanh_(), out=slopes)
                shares.mul_(cut.cap)
            for corner, minus in corners:
                corner.add_(minus)
            shares.sub_(sum_).exp2_()
            torch.bmm(v, g, out=scores)
            scores.sub_(delta).mul_(shares)
            if slopes is not None:
                scores.addcmul_(scores, slopes, value=-1)
            if own_scores is not scores:
                own_shares.copy_(shares)
                own_scores.copy_(scores)
            torch.bmm(own_shares, own_g, out=mixed)
            to_values[:, :, tokens] = result
            torch.baddbmm(mixed, own_scores, own_q, beta=0, alpha=cut.scale, out=mixed)
            to_keys[:, :, tokens] = result
            torch.bmm(own_scores.transpose(1, 2), own_k, out=back)
            add()

        return run

    return [block(tokens) for tokens in cut.blocks()]


def by_token(x: Tensor) -> Tensor:
    """Return an empty tensor of x's shape `[batch, heads, seq, dim]`, token by token in memory."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


@attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return by_token(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    window: int = 0,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    return by_token(query), by_token(key), by_token(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.cap, sinks = inputs
    ctx.save_for_backward(*tensors, *output, sinks)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, sinks = ctx.saved_tensors
    to_sinks = None if sinks is None else sink_gradient(grad, out, lse * LN_2, sinks)
    grads = attention_backward(grad, q, k, v, out, lse, ctx.window, ctx.cap)
    return *grads, None, None, to_sinks


attention.register_autograd(_backward, setup_context=_keep)
