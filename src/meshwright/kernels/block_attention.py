"""Attention of a block of queries over a block of keys, with the log-sum-exp that merges blocks.

PyTorch's public attention doesn't return the log-sum-exp; its internal operators do. The choice of
operator depends on the device, the dtype and the mask; `plain` works everywhere.

In all of them, q is `[batch, heads, queries, head_dim]`, k and v
`[batch, kv_heads, keys, head_dim]` with heads a multiple of kv_heads, and the log-sum-exp
`[batch, heads, queries]` in fp32 at least. A mask is bool `[batch or 1, 1, queries, keys]`, true
where a query may look. `causal` means that query i sees no key after i, of as many keys as queries;
a mask must say so too, and then `causal` only saves work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshwright.program.ring import Piece

# Added to a masked score. Not -inf: a query that sees no key of a block would get a log-sum-exp of
# 0 from the CPU kernel and NaN elsewhere; with this it gets about -1e30, which weighs nothing.
MASKED: Final = -1e30

Grads = tuple[Tensor, Tensor, Tensor]


class VisibleKeys(NamedTuple):
    """Which keys each query may see, in memory linear in their numbers, for `flex_block_attention`.

    `at_*` int `[n]` are positions in the sequence; `of_*` int `[batch or 1, n]` are segment
    (document) numbers, None without documents. A query sees keys of its segment up to its own
    position; with a window, only the last `window` of these. `blocks` are those of FlexAttention's
    `BlockMask`: counts and indices of partial, then of full blocks.
    """

    at_queries: Tensor
    at_keys: Tensor
    of_queries: Tensor | None
    of_keys: Tensor | None
    window: int | None
    blocks: tuple[Tensor, ...]


Mask = Tensor | VisibleKeys


class BlockAttention(NamedTuple):
    """One way to compute the attention of a block.

    `forward(q, k, v, mask, causal)` returns the result, as q, and the log-sum-exp.
    `backward(grad, q, k, v, out, lse, mask, causal)` returns the gradients of q, k and v through
    this block, where `out` and `lse` are those of the softmax over all blocks: the probabilities
    are `exp(score - lse)`, so each block needs nothing from the others. arXiv:2205.14135, algorithm
    4.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Any, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Any, bool], Grads]


def choose(q: Tensor, masked: bool, cap: float | None = None) -> BlockAttention:
    """Return the fastest implementation for q's device and dtype; `masked` says that a mask is
    passed.

    Only plain operations support a soft cap on the scores.
    """
    if cap is not None:
        return plain(cap)
    if q.device.type == "cpu" and not (masked and q.dtype == torch.float16):
        # The kernel's fp16 mask cannot hold MASKED.
        return cpu_flash()
    if not masked and has_cuda_flash(q.device, q.dtype, q.shape[-1]):
        return cuda_flash()
    return plain()


def cpu_flash() -> BlockAttention:
    """Return the implementation by PyTorch's CPU kernel: all float dtypes; masks except in fp16."""
    return BlockAttention(_cpu_forward, _cpu_backward)


def cuda_flash() -> BlockAttention:
    """Return the implementation by FlashAttention on CUDA: fp16 and bf16, head_dim a multiple of 8
    up to 256.

    It takes no mask. arXiv:2307.08691.
    """
    return BlockAttention(_cuda_forward, _cuda_backward)


def plain(cap: float | None = None) -> BlockAttention:
    """Return the implementation by plain torch operations, in fp32 at least: any device, dtype and
    mask.

    It holds all scores at once, `[batch, heads, queries, keys]`. With a soft cap, a score x becomes
    `cap * tanh(x / cap)`.
    """
    if cap is None:
        return BlockAttention(_plain_forward, _plain_backward)
    return BlockAttention(partial(_capped_forward, cap), partial(_plain_backward, cap=cap))


def visible(piece: Piece, window: int | None, device: torch.device) -> Tensor:
    """Return the mask of a piece from its positions, bool `[1, 1, queries, keys]`.

    A query sees its own position and those before it; with a window, only the last `window` of
    these.
    """
    queries = torch.arange(piece.ahead, piece.ahead + piece.rows, device=device)
    back = queries[:, None] - torch.arange(piece.columns, device=device)
    seen = back >= 0
    if window is not None:
        seen &= back < window
    return seen[None, None]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and softmax for inputs of a dtype: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    bias = _bias(mask, q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _rows(q), _rows(k), _rows(v), 0.0, causal, attn_mask=bias
    )
    return out, lse


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
) -> Grads:
    bias = _bias(mask, q.dtype)
    grads: Grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _rows(grad), _rows(q), _rows(k), _rows(v), _rows(out), lse, 0.0, causal, attn_mask=bias
    )
    return grads


def _rows(x: Tensor) -> Tensor:
    """Return x with contiguous head vectors, which the CPU kernel requires without checking."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    # The CPU kernel reads the mask as q's dtype, whatever its own.
    if mask is None:
        return None
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, MASKED)


# It asks the driver, which code that is compiled cannot do.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_cuda_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashAttention on CUDA supports a device, a dtype and a head size."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    assert mask is None
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        _rows(q), _rows(k), _rows(v), 0.0, causal
    )
    return out, lse


def _cuda_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
) -> Grads:
    assert mask is None
    # The state of the random numbers, of which only dropout draws any.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    grads: Grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        _rows(grad),
        _rows(q),
        _rows(k),
        _rows(v),
        _rows(out),
        lse.contiguous(),  # its strides are not read
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        seed,
        offset,
    )
    return grads


def _plain_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, causal, cap)
    lse = scores.logsumexp(-1)
    # Not in place: a selective recompute keeps the product as it was.
    weights = (scores - lse.unsqueeze(-1)).exp_()
    mixed = _grouped(weights, k) @ v.to(weights.dtype)
    return mixed.view(q.shape).to(q.dtype), lse


# One operation, so that selective recomputation keeps what it gives, as of a kernel, and no scores.
@torch.library.custom_op(
    "meshwright::capped_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, float cap)"
    " -> (Tensor, Tensor)",
)
def _capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, cap: float
) -> tuple[Tensor, Tensor]:
    return _plain_forward(query, key, value, mask, causal, cap)


@_capped.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, cap: float
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=wide(query.dtype))


def _capped_forward(
    cap: float, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = torch.ops.meshwright.capped_attention(q, k, v, mask, causal, cap)
    return out


def _plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    cap: float | None = None,
) -> Grads:
    dtype = wide(q.dtype)
    grad, out = grad.to(dtype), out.to(dtype)
    scores = _scores(q, k, mask, causal, cap)
    slope = None
    if cap is not None:  # of cap * tanh(x / cap), 1 - tanh^2; a masked score weighs nothing anyway
        slope = 1 - (scores / cap).clamp_(-1).square_()
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    along = (grad * out).sum(-1, keepdim=True)
    grad = _grouped(grad, k)
    grad_v = _grouped(weights, k).mT @ grad
    inner = (grad @ v.to(dtype).mT).view(weights.shape)
    inner = inner.sub_(along).mul_(weights).mul_(q.shape[-1] ** -0.5)
    inner = _grouped(inner if slope is None else inner.mul_(slope), k)
    grad_q = (inner @ k.to(dtype)).view(q.shape)
    grad_k = inner.mT @ _grouped(q.to(dtype), k)
    return grad_q, grad_k, grad_v


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, cap: float | None) -> Tensor:
    """Return the capped and masked scores, `[batch, heads, queries, keys]` in fp32 at least."""
    dtype = wide(q.dtype)
    scores = _grouped(q.to(dtype) * q.shape[-1] ** -0.5, k) @ k.to(dtype).mT
    scores = scores.view(*q.shape[:3], k.shape[2])
    if cap is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if causal and mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()
    return scores if mask is None else scores.masked_fill(~mask, MASKED)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return x `[batch, heads, n, m]` as `[batch, kv_heads, n * heads / kv_heads, m]`.

    The queries that share a key head are in one matrix, so that a matmul also sums over them.
    """
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])
