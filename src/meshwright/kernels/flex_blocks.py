"""Attention on a GPU where a query does not see all earlier keys: FlexAttention, arXiv:2412.05496.

Documents, windows and soft caps are functions that are compiled into its kernel, so that neither
scores nor masks are stored. Ring attention uses it for its pieces, `varlen` for sequences that
FlashAttention does not support. Without a compiler, a ring uses `block_attention.plain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from meshwright.kernels.block_attention import (
    MASKED,
    BlockAttention,
    Grads,
    Mask,
    VisibleKeys,
    has_cuda_flash,
    wide,
)
from meshwright.models import flex
from meshwright.models.blockwise import by_token
from meshwright.program.attention import ScoreBounds
from meshwright.torch_private import C, dynamo_config

# Queries and keys of a block of the kernel that is skipped, or taken without asking, as a whole.
_SIZE: Final = 128
_QKV: Final = "Tensor query, Tensor key, Tensor value"
_SEEN: Final = (
    "Tensor at_queries, Tensor at_keys, Tensor? of_queries, Tensor? of_keys, int? window, "
    "Tensor[] blocks, float? cap"
)
# One for each kind of layer and shape of a piece, for forwards and backwards: beyond the compiler's
# own limit it would go on without a kernel, and hold all scores.
_KERNELS: Final = 64
# What a dispatcher leaves out below an operator, and the kernel needs: autograd's record, and vmap,
# by which what is seen becomes a part of the kernel.
_NEEDED: Final = (
    "AutogradFunctionality",
    "AutogradOther",
    "AutogradNestedTensor",
    "FuncTorchBatched",
    "FuncTorchBatchedDecomposition",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchGradWrapper",
    "FuncTorchVmapMode",
    "PythonTLSSnapshot",
)


def takes(q: Tensor, segments: Tensor | None, scores: ScoreBounds) -> bool:
    """Whether ring attention uses FlexAttention: on a GPU, with documents, windows or caps, or
    where FlashAttention lacks support."""
    is_bounded = segments is not None or scores.window is not None or scores.cap is not None
    kind = q.device, q.dtype, q.shape[-1]
    return flex.takes(*kind) and (is_bounded or not has_cuda_flash(*kind))


def flex_block_attention(cap: float | None = None) -> BlockAttention:
    """Return the implementation by FlexAttention, whose mask is a `VisibleKeys`; `cap` as in
    `block_attention.plain`."""
    return BlockAttention(partial(_forward, cap), partial(_backward, cap))


def seen(
    positions: tuple[Tensor, Tensor], segments: tuple[Tensor, Tensor] | None, window: int | None
) -> VisibleKeys:
    """Return which keys each query may see, without a wait of the host.

    `positions` are int `[n]` of queries and of keys, `segments` int `[batch, n]` of both, None
    without documents.
    """
    queries, keys = (_ranges(x[None]) for x in positions)
    # A pair of blocks may hold a pair that is seen, or holds no other.
    touched = keys[0][:, None, :] <= queries[1][:, :, None]
    full = keys[1][:, None, :] <= queries[0][:, :, None]
    if window is not None:
        touched &= keys[1][:, None, :] > queries[0][:, :, None] - window
        full &= keys[0][:, None, :] > queries[1][:, :, None] - window
    if segments is not None:
        (low, high), (first, last) = (_ranges(x) for x in segments)
        touched = touched & (first[:, None, :] <= high[:, :, None])
        touched &= last[:, None, :] >= low[:, :, None]
        is_one = (low == high)[:, :, None] & (first == last)[:, None, :]
        full = full & is_one & (low[:, :, None] == first[:, None, :])
    blocks = (*_listed(touched & ~full), *_listed(full))
    of_queries, of_keys = segments if segments is not None else (None, None)
    return VisibleKeys(*positions, of_queries, of_keys, window, blocks)


def _ranges(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value in each block of x `[batch, n]`, each `[batch,
    blocks]`."""
    count = -(-x.shape[1] // _SIZE)
    last = torch.arange(count * _SIZE, device=x.device).clamp_(max=x.shape[1] - 1)
    return x[:, last].view(len(x), count, _SIZE).aminmax(dim=2)


def _listed(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each query block, the number of its key blocks, and all key blocks with these
    first.

    `pairs` is bool `[batch, query blocks, key blocks]`; the results have a head dim of 1.
    """
    order = pairs.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    counts = pairs.sum(-1, dtype=torch.int32)
    return counts[:, None].contiguous(), order.to(torch.int32)[:, None].contiguous()


def _forward(
    cap: float | None, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, causal: bool
) -> tuple[Tensor, Tensor]:
    assert isinstance(mask, VisibleKeys)
    *positions_and_segments, blocks = mask
    result: tuple[Tensor, Tensor] = torch.ops.meshwright.flex_block_attention(
        q, k, v, *positions_and_segments, list(blocks), cap
    )
    return result


def _backward(
    cap: float | None,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask | None,
    causal: bool,
) -> Grads:
    assert isinstance(mask, VisibleKeys)
    *positions_and_segments, blocks = mask
    grads: Grads = torch.ops.meshwright.flex_block_attention_backward(
        grad, q, k, v, out, lse, *positions_and_segments, list(blocks), cap
    )
    return grads


# Operators, so that compiled code and selective recomputation see one of each.
@torch.library.custom_op(
    "meshwright::flex_block_attention",
    mutates_args=(),
    schema=f"({_QKV}, {_SEEN}) -> (Tensor, Tensor)",
)
def _attend(query: Tensor, key: Tensor, value: Tensor, *seen: Any) -> tuple[Tensor, Tensor]:
    with _as_outside(), torch.no_grad():
        out, sums = _by_flex(query, key, value, *seen)
    return by_token(query).copy_(out), sums.clamp(min=MASKED)


@_attend.register_fake
def _empty(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return by_token(query), query.new_empty(query.shape[:3], dtype=wide(query.dtype))


@torch.library.custom_op(
    "meshwright::flex_block_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_QKV}, Tensor out, Tensor sums, {_SEEN}) -> (Tensor, Tensor, Tensor)",
)
def _differentiate(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    *seen: Any,
) -> Grads:
    """Return the gradients through this block, given the result and log-sum-exp over all blocks.

    FlexAttention's backward needs the block's own result, so its forward is recomputed. The whole
    result is the mean of the blocks' with weights `exp(lse of the block - lse of all)`, from which
    the gradients of this block's result and log-sum-exp follow.
    """
    with _as_outside(), torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
        part, part_sums = _by_flex(q, k, v, *seen)
    weight = (part_sums.detach().clamp(min=MASKED) - sums).exp()
    to_part = grad.to(weight.dtype) * weight.unsqueeze(-1)
    to_sums = (to_part * (part.detach() - out)).sum(-1)
    with _as_outside():
        grads = torch.autograd.grad((part, part_sums), (q, k, v), (to_part.to(part.dtype), to_sums))
    q_grad, k_grad, v_grad = map(Tensor.contiguous, grads)
    return q_grad, k_grad, v_grad


@_differentiate.register_fake
def _empty_grads(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Grads:
    q_grad, k_grad, v_grad = (x.new_empty(x.shape) for x in (query, key, value))
    return q_grad, k_grad, v_grad


@contextmanager
def _as_outside() -> Iterator[None]:
    """Dispatch calls inside an operator as if they were outside of any; uses private API of
    torch."""
    private: Any = C
    without = private._dispatch_tls_local_exclude_set()
    for name in _NEEDED:
        without = without.remove(getattr(private.DispatchKey, name))
    with private._ForceDispatchKeyGuard(private._dispatch_tls_local_include_set(), without):
        yield


def _by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at_queries: Tensor,
    at_keys: Tensor,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    window: int | None,
    blocks: list[Tensor],
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the attention over a block of keys and its log-sum-exp, -inf where a query sees no
    key."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    # Numbers are tensors: a compiler would take each for a constant, and compile again for others.
    span = None if window is None else torch.full((), window, device=q.device)
    cap_tensor = None if cap is None else torch.full((), cap, device=q.device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        back = at_queries[query] - at_keys[key]
        visible = back >= 0 if span is None else (back >= 0) & (back < span)
        if of_queries is None or of_keys is None:
            return visible
        return visible & (of_queries[batch, query] == of_keys[batch, key])

    if of_queries is not None and of_keys is not None:
        of_queries, of_keys = (x.expand(q.shape[0], -1) for x in (of_queries, of_keys))
    make: Any = BlockMask.from_kv_blocks
    # One table may serve all rows. An expanded one may not: the kernel takes tables as contiguous.
    mask = make(*blocks, BLOCK_SIZE=_SIZE, mask_mod=sees, seq_lengths=(q.shape[2], k.shape[2]))
    with dynamo_config.patch(recompile_limit=_KERNELS):
        out, aux = _compiled()(
            q,
            k,
            v,
            score_mod=None if cap_tensor is None else flex.bound(cap_tensor),
            block_mask=mask,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    return out, aux.lse


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled
