"""Norms of the residual stream and of heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.models.ops import rms_norm
from meshwright.spec.model import ModelSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, with its statistics in fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x `[..., dim]` normalised and weighted, in its own dtype."""
        return rms_norm(x, self.weight, self.eps)


def norm(spec: ModelSpec) -> nn.Module:
    """Return a norm of the stream: RMSNorm, or LayerNorm with bias."""
    if spec.norm == "rms":
        return RMSNorm(spec.dim, spec.norm_eps)
    return nn.LayerNorm(spec.dim, eps=spec.norm_eps)


def head_norm(spec: ModelSpec) -> RMSNorm | None:
    """Return a norm over each head, where queries and keys have one."""
    return RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm == "head" else None
