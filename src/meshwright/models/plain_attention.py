"""Attention in plain operations: what sliding windows and soft caps need where no kernel has them.

They hold a whole square of scores or of a mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def band(q: Tensor, keys: int, window: int | None) -> Tensor:
    """Return the mask `[queries, keys]` of q `[..., queries, head_dim]`: no later key is seen.

    The last query is at the last key; of a window's queries, each sees that many keys at most.
    """
    queries = q.shape[-2]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril_(keys - queries)
    return seen if window is None else seen.triu_(keys - queries - window + 1)


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cap: float) -> Tensor:
    """Return attention of scores `cap * tanh(x / cap)` where `mask` is true, in fp32 at least."""
    batch, heads, queries, dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    # Queries that share a head of keys are rows of one matrix, so that no keys are repeated.
    joint = batch, k.shape[1], heads // k.shape[1] * queries
    scores = q.to(dtype).reshape(*joint, dim) @ k.to(dtype).mT
    scores = (torch.tanh(scores / (cap * math.sqrt(dim))) * cap).view(batch, heads, queries, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    mixed = scores.softmax(-1).view(*joint, -1) @ v.to(dtype)
    return mixed.view(batch, heads, queries, -1).to(q.dtype)
