"""Causal attention with a window, a soft cap or sinks on a GPU: FlexAttention, arXiv:2412.05496.

It is compiled for given score bounds, skips blocks outside the window, and stores no matrix of all
scores. PyTorch's module is imported on first use, because that takes long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from meshwright.program.attention import ScoreBounds

# Triton's matrix products need so many columns.
_MIN_HEAD_DIM: Final = 16
# Whether Triton is installed, which PyTorch's builds for GPUs bring along. torch 2.11 cannot trace
# the lookup, and `assume_constant_result` would import the compiler, which takes a second.
HAS_TRITON: Final = find_spec("triton") is not None
# What attends, what bounds a score, and which blocks of keys those of queries see.
_Parts = tuple[Callable[..., Any], Callable[..., Tensor] | None, Any]


def takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlexAttention supports tensors of this device, dtype and head dim, which needs
    Triton.
    """
    is_wide = head_dim >= _MIN_HEAD_DIM and dtype != torch.float64
    return is_wide and device.type == "cuda" and HAS_TRITON


def attention(
    q: Tensor, k: Tensor, v: Tensor, scores: ScoreBounds, sinks: Tensor | None = None
) -> Tensor:
    """Return causal attention for equal numbers of queries and keys; shapes as
    `blockwise.attention`.
    """
    # Inside code that is compiled it is part of that.
    make = _parts if torch.compiler.is_compiling() else _compiled_parts
    attend, bound, blocks = make(scores, q.shape[-2], q.device)
    grouped = q.shape[1] != k.shape[1]
    options: dict[str, Any] = {"score_mod": bound, "block_mask": blocks, "enable_gqa": grouped}
    if sinks is None:
        attended: Tensor = attend(q, k, v, **options)
        return attended
    # Its log-sum-exp has a gradient, so that of the sinks follows.
    from torch.nn.attention.flex_attention import AuxRequest

    out, aux = attend(q, k, v, **options, return_aux=AuxRequest(lse=True))
    share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])
    sunk: Tensor = (out * share.unsqueeze(-1)).to(out.dtype)
    return sunk


@lru_cache(maxsize=16)
def _compiled_parts(scores: ScoreBounds, length: int, device: torch.device) -> _Parts:
    """Return `_parts` with attention compiled; cached, so that equal arguments share one
    compilation.
    """
    attend, bound, blocks = _parts(scores, length, device)
    return torch.compile(attend), bound, blocks


def _parts(scores: ScoreBounds, length: int, device: torch.device) -> _Parts:
    """Return FlexAttention's function, score modifier (None without a cap) and block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window = scores.window

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_past = query >= key
        return is_past if window is None else is_past & (query - key < window)

    blocks = create_block_mask(sees, None, None, length, length, device=device)
    return flex_attention, None if scores.cap is None else bound(scores.cap), blocks


def bound(cap: float | Tensor) -> Callable[..., Tensor]:
    """Return a score modifier for FlexAttention: `cap * tanh(x / cap)` of a score x."""

    def bounded(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return bounded
