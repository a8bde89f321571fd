"""Causal attention on a CPU by blocks of matrix products, forward and backward.

PyTorch's CPU kernel (`_scaled_dot_product_flash_attention_for_cpu`) works head by head, with
products too small for the library's best, which in bf16 cost more than in fp32. Here a block is
some query rows of several heads at once: their scores stay in a core's cache, and each product is
one batched call. What is kept for the backward is the kernel's: q, k, v, the result and the
log-sum-exp. arXiv:2205.14135, algorithms 1 and 4, with all keys of a row in one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

# Where torch.ops has the two operators.
SPACE: Final = "meshwright"
# Tokens of a row up to which it was measured to be faster: `python -m benchmarks.attention`.
LONGEST: Final = 512
# Rows of queries in a block, and the bytes that its scores may have: a core's second-level cache.
QUERIES: Final = 64
SCORES: Final = 1 << 20


def takes(q: Tensor, k: Tensor) -> bool:
    """Whether this is faster than PyTorch's kernel; q and k as for `attention`.

    In bf16 on a CPU, of short rows. In fp32 neither is everywhere: docs/benchmarks.
    """
    is_short = q.shape[-2] == k.shape[-2] <= LONGEST
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and is_short


@torch.library.custom_op(f"{SPACE}::attention", mutates_args=(), device_types="cpu")
def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return causal attention and the log-sum-exp of its scores.

    query `[batch, heads, seq, head_dim]`, key and value `[batch, kv_heads, seq, head_dim]`, fp32 or
    bf16; the result is as query, token by token in memory, the sums fp32 `[batch, heads, seq]`.
    Scores are in fp32; probabilities are rounded before the second product, as the kernel does.
    """
    batch, heads, length, dim = query.shape
    groups = (key.shape[1], heads // key.shape[1])
    out, sums = by_token(query), query.new_empty(batch, *groups, length, dtype=torch.float32)
    rooms = _Rooms(query.dtype, length)
    for part in _parts(batch, *groups, length):
        qs = _rows(_grouped(query, groups)[part], torch.float32) * (1 / math.sqrt(dim))
        keys = _rows(key[part], torch.float32).transpose(1, 2)
        values = _rows(value[part], value.dtype)
        into, lse = _grouped(out, groups)[part], sums[part]
        for at in _blocks(length):
            scores, shares = rooms.wide(len(qs), groups[1], at)
            torch.bmm(_block(qs, at), keys[..., : at.stop], out=scores)
            rooms.hide(scores, at, -math.inf)
            top = scores.amax(-1)
            torch.softmax(scores, -1, out=shares)
            # The largest share is `exp(top - lse)`.
            lse[..., at] = (top - shares.amax(-1).log_()).view_as(lse[..., at])
            mixed = torch.bmm(rooms.rounded(shares), values[:, : at.stop])
            into[..., at, :] = mixed.view_as(into[..., at, :])
    return out, sums.flatten(1, 2)


@torch.library.custom_op(f"{SPACE}::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; arguments as `attention` has and gives them."""
    batch, heads, length, dim = query.shape
    groups, scale = (key.shape[1], heads // key.shape[1]), 1 / math.sqrt(dim)
    q_grad, k_grad, v_grad = by_token(query), by_token(key), by_token(value)
    rooms = _Rooms(query.dtype, length)
    for part in _parts(batch, *groups, length):
        own, came = (_rows(_grouped(x, groups)[part], x.dtype) for x in (query, grad))
        qs, wide = own.float() * scale, came.float()
        rests = (wide * _rows(_grouped(out, groups)[part], out.dtype)).sum(-1, keepdim=True)
        sums = _rows(_grouped(lse, groups)[part].unsqueeze(-1), lse.dtype)
        plain = _rows(key[part], key.dtype)
        keys = plain.float().transpose(1, 2)
        values = _rows(value[part], torch.float32).transpose(1, 2)
        to_keys, to_values = (qs.new_zeros(plain.shape) for _ in range(2))
        into = _grouped(q_grad, groups)[part]
        for at in _blocks(length):
            shares, scores = rooms.wide(len(qs), groups[1], at)
            torch.bmm(_block(qs, at), keys[..., : at.stop], out=shares)
            rooms.hide(shares.sub_(_block(sums, at)).exp_(), at, 0.0)
            torch.bmm(_block(wide, at), values[..., : at.stop], out=scores)
            scores.sub_(_block(rests, at)).mul_(shares)
            _add(to_values[:, : at.stop], rooms.rounded(shares), _block(came, at))
            narrow = rooms.rounded(scores)
            _add(to_keys[:, : at.stop], narrow, _block(own, at))
            mixed = torch.bmm(narrow, plain[:, : at.stop]).mul_(scale)
            into[..., at, :] = mixed.view_as(into[..., at, :])
        k_grad[part] = to_keys.mul_(scale).view_as(k_grad[part])
        v_grad[part] = to_values.view_as(v_grad[part])
    return q_grad, k_grad, v_grad


class _Rooms:
    """Memory for the scores of a block, used again by each, so that it stays in cache."""

    def __init__(self, dtype: torch.dtype, length: int) -> None:
        self._length = length
        self._wide = torch.empty(2, 0)
        self._narrow = torch.empty(0, dtype=dtype)
        self._later = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu_(1)

    def wide(self, heads: int, shared: int, at: slice) -> tuple[Tensor, Tensor]:
        """Return two in fp32 as `[heads, shared * block, keys]`."""
        size = heads * shared * min(QUERIES, self._length) * self._length
        if self._wide.shape[1] < size:
            self._wide = torch.empty(2, size)
            self._narrow = self._narrow.new_empty(size)
        shape = (heads, shared * (at.stop - at.start), at.stop)
        first, second = (room[: math.prod(shape)].view(shape) for room in self._wide)
        return first, second

    def rounded(self, scores: Tensor) -> Tensor:
        """Return scores in the dtype of products: in a room of their own, or as they are."""
        if scores.dtype == self._narrow.dtype:
            return scores
        return self._narrow[: scores.numel()].view(scores.shape).copy_(scores)

    def hide(self, scores: Tensor, at: slice, value: float) -> None:
        """Fill what comes after each query of a block."""
        size = at.stop - at.start
        here = _grouped(scores, (-1, size))[..., at]
        here.masked_fill_(self._later[:size, :size], value)


def _parts(batch: int, kv_heads: int, shared: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows and of key heads, so many that a block's scores stay in cache."""
    heads = max(1, SCORES // (4 * shared * min(QUERIES, length) * length))
    if heads >= kv_heads:
        rows = heads // kv_heads
        for start in range(0, batch, rows):
            yield slice(start, start + rows), slice(0, kv_heads)
        return
    for row in range(batch):
        for start in range(0, kv_heads, heads):
            yield slice(row, row + 1), slice(start, start + heads)


def _blocks(length: int) -> Iterator[slice]:
    """Yield slices of queries; a causal block sees the keys up to its stop."""
    for start in range(0, length, QUERIES):
        yield slice(start, min(start + QUERIES, length))


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x `[rows, heads, ...]` with one dim for both, contiguous, in a dtype."""
    return x.to(dtype).flatten(0, 1).contiguous()


def _grouped(x: Tensor, groups: tuple[int, int]) -> Tensor:
    """Return a view of x `[batch, heads, ...]` as `[batch, kv_heads, heads of each, ...]`."""
    out: Tensor = x.unflatten(1, groups)  # type: ignore[no-untyped-call]
    return out


def _block(x: Tensor, at: slice) -> Tensor:
    """Return a block of x `[heads, shared, seq, dim]` as `[heads, shared * block, dim]`."""
    return x[:, :, at].flatten(1, 2)


def _add(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left^T right` to a sum in fp32."""
    if left.dtype == total.dtype:
        total.baddbmm_(left.transpose(1, 2), right)
    else:
        total.add_(torch.bmm(left.transpose(1, 2), right))


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
