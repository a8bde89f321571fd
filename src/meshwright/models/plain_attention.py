"""Attention in plain operations: windows, soft caps and sinks that no kernel supports.

It stores the full matrix of scores, or of a mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.models.ops import softcapped


def band(q: Tensor, keys: int, window: int | None) -> Tensor:
    """Return the causal mask bool `[queries, keys]`, true where a query of `q` may attend to a key.

    The last query is at the last of the `keys` keys. With a `window`, a query attends to its last
    `window` keys only, its own included.
    """
    queries = q.shape[-2]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril_(keys - queries)
    return seen if window is None else seen.triu_(keys - queries - window + 1)


def plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention where `mask` is true (None: everywhere), computed in fp32 at least.

    With a cap, scores become `cap * tanh(score / cap)`; sinks `[heads]` are an additional score in
    each softmax.
    """
    batch, heads, queries, dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    # Queries that share a head of keys are rows of one matrix, so that no keys are repeated.
    joint = batch, k.shape[1], heads // k.shape[1] * queries
    scores = q.to(dtype).reshape(*joint, dim) @ k.to(dtype).mT
    scores = softcapped(scores / math.sqrt(dim), cap).view(batch, heads, queries, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        last = sinks.to(dtype)[:, None, None].expand(batch, -1, queries, 1)
        scores = torch.cat((scores, last), -1)
    shares = scores.softmax(-1)[..., : k.shape[2]]
    mixed = shares.reshape(*joint, -1) @ v.to(dtype)
    return mixed.view(batch, heads, queries, -1).to(q.dtype)
