"""Norms of the residual stream, of heads and of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.models.ops import rms_norm
from meshwright.spec.model import ModelSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, with its statistics in fp32.

    With `plus_one` it multiplies by 1 + weight, in fp32, as Gemma does.
    """

    def __init__(self, dim: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim) if plus_one else torch.ones(dim))
        self.eps = eps
        self.plus_one = plus_one

    def forward(self, x: Tensor) -> Tensor:
        """Return x `[..., dim]` normalized and weighted, in its own dtype."""
        return rms_norm(x, self.weight, self.eps, plus_one=self.plus_one)


def norm(spec: ModelSpec) -> nn.Module:
    """Return a new norm of the residual stream: RMSNorm, or LayerNorm with bias."""
    if spec.norm == "rms":
        return RMSNorm(spec.dim, spec.norm_eps, plus_one=spec.norm_plus_one)
    return nn.LayerNorm(spec.dim, eps=spec.norm_eps)


def head_norm(spec: ModelSpec, heads: int) -> RMSNorm | None:
    """Return the norm of queries or keys, over each head or over all heads; None if the model has
    none.
    """
    if spec.qk_norm == "none":
        return None
    dim = spec.head_dim * (heads if spec.qk_norm == "all" else 1)
    return RMSNorm(dim, spec.norm_eps, plus_one=spec.norm_plus_one)


def norm_pair(q: Tensor, k: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """Normalize queries and keys `[batch, seq, heads * head_dim]`, each over all heads."""
    return q_norm(q), k_norm(k)
