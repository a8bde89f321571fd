"""The transformer block: attention or a recurrence, then an MLP or experts, with residual sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.models.attention import Attention
from meshwright.models.context import PLAIN, Context
from meshwright.models.delta_net import GatedDeltaNet
from meshwright.models.dropout import Dropout
from meshwright.models.experts import ExpertMLP
from meshwright.models.latent import LatentAttention
from meshwright.models.mamba import Mamba2
from meshwright.models.mlp import MLP
from meshwright.models.norms import norm
from meshwright.models.rope import Rope
from meshwright.spec.model import LayerSpec, ModelSpec

Recurrence = GatedDeltaNet | Mamba2
"""The first sublayer of a layer with a recurrence in place of attention."""


def mixing(spec: ModelSpec, rope: Rope, layer: str) -> Attention | LatentAttention | Recurrence:
    """Return the first sublayer of a layer: attention, or a recurrence."""
    kind = spec.layer(int(layer))
    if kind.recurs:
        return (GatedDeltaNet if kind.delta else Mamba2)(spec, layer)
    return (LatentAttention if spec.is_latent else Attention)(spec, rope, layer)


def feed_forward(spec: ModelSpec, kind: LayerSpec) -> MLP | ExpertMLP:
    """Return the second sublayer of a layer of this `kind`: an MLP, or a mixture of experts."""
    return ExpertMLP(spec) if spec.has_experts(kind) else MLP(spec)


class Block(nn.Module):
    """A decoder layer: attention and MLP, with norms before or after each, and residual sums.

    Sequential, as in Llama: `x += attn(norm(x)); x += mlp(norm(x))`. Parallel, as in GPT-NeoX
    (arXiv:2204.06745, section 2.1): `x + attn(norm(x)) + mlp(norm(x))`. A norm after a sublayer
    applies to the sublayer's output, as in OLMo 2 and Gemma 2. Dropout, if any, comes before each
    addition, with the keys of this layer in the context. `scale` multiplies the sublayers' outputs,
    as in Granite.
    """

    def __init__(self, spec: ModelSpec, rope: Rope, layer: str) -> None:
        super().__init__()
        self.attn_norm = norm(spec) if spec.norms_before else nn.Identity()
        self.attn = mixing(spec, rope, layer)
        self.attn_post_norm = norm(spec) if spec.norms_after else nn.Identity()
        self.mlp_norm = norm(spec) if spec.norms_before else nn.Identity()
        self.mlp = feed_forward(spec, spec.layer(int(layer)))
        self.mlp_post_norm = norm(spec) if spec.norms_after else nn.Identity()
        self.attn_drop = Dropout(spec.dropout, site=1)
        self.mlp_drop = Dropout(spec.dropout, site=2)
        self.is_parallel = spec.parallel_residual
        self.scale = spec.residual_scale

    def forward(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        """Return the residual stream after this block; x `[batch, seq, dim]`."""
        added = self.attn_post_norm(self.attn(self.attn_norm(x), context))
        mixed = self._add(x, self.attn_drop(added, context))
        del added  # frees its memory before the MLP computes
        source = x if self.is_parallel else mixed
        added = self.mlp_post_norm(self.mlp(self.mlp_norm(source), context))
        return self._add(mixed, self.mlp_drop(added, context))

    def _add(self, x: Tensor, added: Tensor) -> Tensor:
        return torch.add(x, added, alpha=self.scale)
