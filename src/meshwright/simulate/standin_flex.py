"""FlexAttention on the stand-in for a GPU: operators with the inputs and outputs of its compiled
kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.block_attention import wide

_QKV = "Tensor query, Tensor key, Tensor value"


@torch.library.custom_op(
    "standin::flex", mutates_args=(), schema=f"({_QKV}, Tensor[] blocks) -> (Tensor, Tensor)"
)
def _forward(query: Tensor, key: Tensor, value: Tensor, blocks: list[Tensor]) -> Any:
    raise NotImplementedError("the stand-in computes nothing")


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, blocks: list[Tensor]) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    return out, query.new_empty(query.shape[:-1], dtype=wide(query.dtype))


@torch.library.custom_op(
    "standin::flex_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor grad_lse, {_QKV}, Tensor out, Tensor lse, Tensor[] blocks)"
    " -> (Tensor, Tensor, Tensor)",
)
def _backward(*_: Any) -> Any:
    raise NotImplementedError("the stand-in computes nothing")


@_backward.register_fake
def _(grad: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, blocks = inputs
    ctx.save_for_backward(*qkv, *output, *blocks)


def _differentiate(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    *saved, first, second, third, last = ctx.saved_tensors  # once: they may be computed again
    blocks = [first, second, third, last]
    grads = torch.ops.standin.flex_backward(grad, grad_lse, *saved, blocks)
    return *grads, [None] * len(blocks)


_forward.register_autograd(_differentiate, setup_context=_keep)


def attend(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, **options: Any) -> Any:
    """Return a fake result of `flex_attention`, with the log-sum-exp if `return_aux` is given."""
    blocks = [block_mask.kv_num_blocks, block_mask.kv_indices]
    blocks += [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
    out, lse = torch.ops.standin.flex(query, key, value, blocks)
    return out if options.get("return_aux") is None else (out, SimpleNamespace(lse=lse))
