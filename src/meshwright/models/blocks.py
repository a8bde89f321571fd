"""The transformer block, as plain modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.models.attention import Attention, Project, each
from meshwright.models.context import PLAIN, Context
from meshwright.models.dropout import Dropout
from meshwright.models.norms import norm
from meshwright.models.ops import activated, gated
from meshwright.models.rope import Rope
from meshwright.spec.model import ModelSpec


class GatedMLP(nn.Module):
    """A gated MLP, as Llama's: `down(act(gate(x)) * up(x))`, SwiGLU with SiLU. arXiv:2002.05202."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.dim, spec.ffn_dim, bias=spec.mlp_bias)
        self.up = nn.Linear(spec.dim, spec.ffn_dim, bias=spec.mlp_bias)
        self.down = nn.Linear(spec.ffn_dim, spec.dim, bias=spec.mlp_bias)
        self.act = spec.activation
        self.project: Project = each

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP of x `[..., dim]`, of the same shape."""
        gate, up = self.project(x, (self.gate, self.up))
        out: Tensor = self.down(gated(gate, up, self.act))
        return out


class MLP(nn.Module):
    """A plain MLP, as GPT-NeoX's: `down(act(up(x)))`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.dim, spec.ffn_dim, bias=spec.mlp_bias)
        self.down = nn.Linear(spec.ffn_dim, spec.dim, bias=spec.mlp_bias)
        self.act = spec.activation
        self.project: Project = each

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP of x `[..., dim]`, of the same shape."""
        (up,) = self.project(x, (self.up,))
        out: Tensor = self.down(activated(up, self.act))
        return out


class Block(nn.Module):
    """Attention and MLP around the residual stream, with norms before them, after them or both.

    Sequential, as in Llama: `x += attn(norm(x)); x += mlp(norm(x))`. Parallel, as in GPT-NeoX
    (arXiv:2204.06745, section 2.1): `x + attn(norm(x)) + mlp(norm(x))`. A norm after is of what is
    added to the stream, as in OLMo 2 and Gemma 2. Dropout, if any, comes before each addition, with
    the keys of this layer in the context. What is added is multiplied by `scale`, as in Granite.
    """

    def __init__(self, spec: ModelSpec, rope: Rope, layer: str) -> None:
        super().__init__()
        self.attn_norm = norm(spec) if spec.norms_before else nn.Identity()
        self.attn = Attention(spec, rope, layer)
        self.attn_post_norm = norm(spec) if spec.norms_after else nn.Identity()
        self.mlp_norm = norm(spec) if spec.norms_before else nn.Identity()
        self.mlp = GatedMLP(spec) if spec.gated_mlp else MLP(spec)
        self.mlp_post_norm = norm(spec) if spec.norms_after else nn.Identity()
        self.attn_drop = Dropout(spec.dropout, site=1)
        self.mlp_drop = Dropout(spec.dropout, site=2)
        self.is_parallel = spec.parallel_residual
        self.scale = spec.residual_scale

    def forward(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        """Return the stream after this block; x `[batch, seq, dim]`."""
        added = self.attn_post_norm(self.attn(self.attn_norm(x), context))
        mixed = self._add(x, self.attn_drop(added, context))
        source = x if self.is_parallel else mixed
        added = self.mlp_post_norm(self.mlp(self.mlp_norm(source)))
        return self._add(mixed, self.mlp_drop(added, context))

    def _add(self, x: Tensor, added: Tensor) -> Tensor:
        return torch.add(x, added, alpha=self.scale)
