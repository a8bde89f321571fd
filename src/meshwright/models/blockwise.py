"""Causal attention on a CPU by blocks of matrix products, forward and backward.

PyTorch's CPU kernel (`_scaled_dot_product_flash_attention_for_cpu`) works head by head, with
products too small for the library's best. Here a block has some rows of several heads at once:
its scores stay in a core's cache, and each product is one batched call. Queries that share a head
of keys are rows of one matrix, token by token, so that those after a key are a slice of it. What
is kept for the backward is the kernel's: q, k, v, the result and the log-sum-exp.
arXiv:2205.14135, algorithms 1 and 4, with all keys of a query, or all queries of a key, in one
block. Exponentials are powers of two, which PyTorch computes faster on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshwright.program.attention import BLOCK, Cut, by_blocks

# Where torch.ops has the two operators.
SPACE: Final = "meshwright"
_LOG2_E: Final = 1 / math.log(2)
_PRECISIONS: Final = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def takes(q: Tensor, k: Tensor) -> bool:
    """Whether this is faster than PyTorch's kernel; q and k as for `attention`.

    In bf16 and fp32 on a CPU, of rows that are not too long, nor short in fp32.
    """
    precision = _PRECISIONS.get(q.dtype, "")
    if q.device.type != "cpu" or q.shape[-2] != k.shape[-2]:
        return False
    return by_blocks(q.shape[1], k.shape[1], q.shape[-2], precision)


@torch.library.custom_op(f"{SPACE}::attention", mutates_args=(), device_types="cpu")
def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return causal attention and the log-sum-exp of its scores, in powers of two.

    query `[batch, heads, seq, head_dim]`, key and value `[batch, kv_heads, seq, head_dim]`, fp32 or
    bf16; the result is as query, token by token in memory, the sums fp32 `[batch, heads, seq]`.
    Scores are in fp32; exponentials are rounded before the second product, as the kernel does.
    """
    cut = _PlannedCut.of_call(query, key)
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
    return out, lse


@torch.library.custom_op(f"{SPACE}::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; arguments as `attention` has and gives them."""
    cut = _PlannedCut.of_call(query, key)
    q_grad, k_grad, v_grad = by_token(query), by_token(key), by_token(value)
    queries, came = (_FactorMemory.of(cut.queries, query.dtype) for _ in range(2))
    keys, values = (_FactorMemory.of(cut.keys, query.dtype) for _ in range(2))
    total, sums, rests = cut.queries(), cut.queries(1), cut.queries(1)
    blocks = _key_blocks(cut, queries, came, keys, values, total, sums, rests)
    spread, grads, outs = (cut.by_key(x) for x in (query, grad, out))
    kept, back = cut.by_key(lse.unsqueeze(-1)), cut.by_key(q_grad)
    for part in cut.parts(*key.shape[:2]):
        queries.fill(cut.as_queries, spread[part])
        came.fill(cut.as_queries, grads[part])
        keys.fill(cut.as_keys, key[part])
        values.fill(cut.as_keys, value[part])
        torch.mul(cut.as_queries(came.wide), outs[part], out=cut.as_queries(total))
        torch.sum(total, -1, keepdim=True, out=rests)
        cut.as_queries(sums).copy_(kept[part])
        to_keys, to_values = k_grad[part], v_grad[part]
        for block in blocks:
            block(to_keys, to_values)
        torch.mul(cut.as_queries(total), cut.scale, out=back[part])
    return q_grad, k_grad, v_grad


def _query_blocks(
    cut: _PlannedCut, queries: Tensor, keys: Tensor, values: Tensor, tops: Tensor, totals: Tensor
) -> list[Callable[[Tensor], None]]:
    """Return what writes blocks of a part's result, each of all keys up to its last query."""
    scores = _FactorMemory.of(cut.room, values.dtype)
    results = torch.empty(queries[:, : BLOCK * cut.shared].shape, dtype=values.dtype).flatten()
    later = cut.hidden().transpose(0, 1)

    def block(at: slice, size: int) -> Callable[[Tensor], None]:
        rows = slice(at.start * cut.shared, at.stop * cut.shared)
        q, k, v = queries[:, rows], keys[:, : at.stop].transpose(1, 2), values[:, : at.stop]
        top, total = tops[:, rows], totals[:, rows]
        wide, shares = scores.shaped(*q.shape[:2], at.stop)
        corner, hidden = wide[..., at], later[: q.shape[1], :size]
        mixed = _shaped(results, *q.shape)
        ratio = cut.as_queries(mixed), cut.as_queries(total)

        def run(into: Tensor) -> None:
            torch.baddbmm(wide, q, k, beta=0, alpha=cut.scale * _LOG2_E, out=wide)
            corner.add_(hidden)
            torch.amax(wide, -1, keepdim=True, out=top)
            torch.sum(wide.sub_(top).exp2_(), -1, keepdim=True, out=total)
            if shares is not wide:
                shares.copy_(wide)
            torch.bmm(shares, v, out=mixed)
            torch.div(*ratio, out=into[:, :, at])

        return run

    return [block(at, size) for at, size in cut.blocks()]


def _key_blocks(
    cut: _PlannedCut,
    queries: _FactorMemory,
    came: _FactorMemory,
    keys: _FactorMemory,
    values: _FactorMemory,
    total: Tensor,
    sums: Tensor,
    rests: Tensor,
) -> list[Callable[[Tensor, Tensor], None]]:
    """Return what does blocks of a part's keys, each with all queries from its first key on.

    They write their gradients, and add to `total`, that of the queries.
    """
    dtype = queries.narrow.dtype
    first, second = (_FactorMemory.of(cut.room, dtype) for _ in range(2))
    grads = torch.empty(keys.narrow[:, :BLOCK].shape, dtype=dtype).flatten()
    parts = torch.empty(queries.narrow.shape, dtype=dtype).flatten()
    earlier = cut.hidden()

    def block(at: slice, size: int) -> Callable[[Tensor, Tensor], None]:
        rows = slice(at.start * cut.shared, None)
        k, v = keys.wide[:, at], values.wide[:, at]
        q, g = queries.wide[:, rows].transpose(1, 2), came.wide[:, rows].transpose(1, 2)
        own_k, own_q, own_g = keys.narrow[:, at], queries.narrow[:, rows], came.narrow[:, rows]
        shape = (*k.shape[:2], q.shape[2])
        (shares, own_shares), (scores, own_scores) = first.shaped(*shape), second.shaped(*shape)
        flipped = own_scores.transpose(1, 2)
        wide = size * cut.shared
        corner, hidden = shares[..., :wide], earlier[:size, :wide]
        sum_, rest = sums[:, rows].transpose(1, 2), rests[:, rows].transpose(1, 2)
        mixed, back, part = _shaped(grads, *k.shape), _shaped(parts, *own_q.shape), total[:, rows]
        result = cut.as_keys(mixed)

        def run(to_keys: Tensor, to_values: Tensor) -> None:
            torch.baddbmm(shares, k, q, beta=0, alpha=cut.scale * _LOG2_E, out=shares)
            corner.add_(hidden)
            shares.sub_(sum_).exp2_()
            torch.bmm(v, g, out=scores)
            scores.sub_(rest).mul_(shares)
            if own_scores is not scores:
                own_shares.copy_(shares)
                own_scores.copy_(scores)
            torch.bmm(own_shares, own_g, out=mixed)
            to_values[:, :, at] = result
            torch.baddbmm(mixed, own_scores, own_q, beta=0, alpha=cut.scale, out=mixed)
            to_keys[:, :, at] = result
            torch.bmm(flipped, own_k, out=back)
            if at.start:
                part.add_(back)
            else:
                part.copy_(back)

        return run

    return [block(at, size) for at, size in cut.blocks()]


class _FactorMemory(NamedTuple):
    """Memory for a factor in fp32 and in the dtype of products: the same if that is fp32."""

    wide: Tensor
    narrow: Tensor

    @classmethod
    def of(cls, make: Callable[..., Tensor], dtype: torch.dtype) -> _FactorMemory:
        """Return new memory."""
        wide = make()
        return cls(wide, wide if dtype == wide.dtype else make(dtype=dtype))

    def fill(self, view: Callable[[Tensor], Tensor], source: Tensor) -> None:
        """Copy `source` into what `view` makes of both."""
        view(self.narrow).copy_(source)
        if self.wide is not self.narrow:
            self.wide.copy_(self.narrow)

    def shaped(self, *shape: int) -> _FactorMemory:
        """Return the start of both, flat memory, in a shape."""
        wide = _shaped(self.wide, *shape)
        same = self.wide is self.narrow
        return _FactorMemory(wide, wide if same else _shaped(self.narrow, *shape))


class _PlannedCut(Cut):
    """A cut with its memory and the views of tensors that follow from it."""

    @classmethod
    def of_call(cls, query: Tensor, key: Tensor) -> _PlannedCut:
        """Return that of a call."""
        batch, kv_heads, length, dim = key.shape
        return cls(*Cut.of(batch, query.shape[1], kv_heads, length, dim))

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return 1 / math.sqrt(self.dim)

    def parts(self, batch: int, kv_heads: int) -> Iterator[tuple[slice, slice]]:
        """Yield slices of rows and of heads of keys."""
        for row in range(0, batch, self.rows):
            for head in range(0, kv_heads, self.heads):
                yield slice(row, row + self.rows), slice(head, head + self.heads)

    def blocks(self) -> Iterator[tuple[slice, int]]:
        """Yield slices of tokens, and how many they are."""
        for start in range(0, self.length, BLOCK):
            stop = min(start + BLOCK, self.length)
            yield slice(start, stop), stop - start

    def queries(self, dim: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory for a part's queries `[heads, seq * shared, dim]`."""
        size = self.length * self.shared
        return torch.empty(self.rows * self.heads, size, dim or self.dim, dtype=dtype)

    def keys(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory for a part's keys `[heads, seq, dim]`."""
        return torch.empty(self.rows * self.heads, self.length, self.dim, dtype=dtype)

    def room(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory for a block's scores."""
        return torch.empty(self.scores, dtype=dtype)

    def hidden(self) -> Tensor:
        """Return `[keys, queries]` of a block on the diagonal: -inf where a key comes later."""
        later = torch.full((BLOCK, BLOCK), -math.inf).tril_(-1)
        return later.repeat_interleave(self.shared, 1)

    def by_key(self, x: Tensor) -> Tensor:
        """Return x `[batch, heads, seq, dim]` seen as `[batch, kv_heads, seq, shared, dim]`."""
        out: Tensor = x.unflatten(1, (-1, self.shared))  # type: ignore[no-untyped-call]
        return out.transpose(2, 3)

    def as_queries(self, x: Tensor) -> Tensor:
        """Return queries `[heads, tokens * shared, dim]` as a part of what `by_key` gives."""
        return x.view(self.rows, self.heads, -1, self.shared, x.shape[-1])

    def as_keys(self, x: Tensor) -> Tensor:
        """Return keys `[heads, tokens, dim]` as a part of `[batch, kv_heads, seq, dim]`."""
        return x.view(self.rows, self.heads, *x.shape[1:])


def _shaped(memory: Tensor, *shape: int) -> Tensor:
    """Return the start of flat memory in a shape."""
    return memory[: math.prod(shape)].view(shape)


def by_token(x: Tensor) -> Tensor:
    """Return an empty tensor as x `[batch, heads, seq, dim]` that has a token's heads together."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return by_token(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return by_token(query), by_token(key), by_token(value)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = attention_backward(grad, *ctx.saved_tensors)
    return found


attention.register_autograd(_backward, setup_context=_keep)
