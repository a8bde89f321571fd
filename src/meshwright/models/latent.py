"""Latent attention: keys and values of all heads are computed from one small vector per token.

DeepSeek-V2, arXiv:2405.04434, section 2.1; DeepSeek-V3, arXiv:2412.19437, section 2.1.1.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.models.attention import Core, Project, attend, each
from meshwright.models.context import PLAIN, Context
from meshwright.models.lora import add_linears, apply
from meshwright.models.norms import RMSNorm
from meshwright.models.ops import rotate
from meshwright.models.rope import Rope
from meshwright.program.attention import ScoreBounds
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import attention_linears

# Of the norms of latent vectors, whatever a model's own is: DeepSeek's code and transformers'.
LATENT_EPS: Final = 1e-6


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA): projections around `core`, the scores and the softmax.

    `kv_a` computes from the hidden states a latent vector, and a rotated key that all heads share;
    `kv_b` computes the remaining dims of each head's key and its value from the normalized latent
    vector. Queries come from a latent vector in the same way, by `q_a` and `q_b`, or directly by
    `q`. Context parallelism may replace `core`, tensor parallelism `project`, which computes all
    projections of the hidden states.

    The core receives queries, keys and values of one size, padded with zeros. The number of heads
    follows from the width of the projections' outputs, so a rank may have a part of the heads. The
    cache stores latent vectors and shared keys, from which heads are recomputed.
    """

    q: nn.Linear | None
    q_a: nn.Linear | None
    q_a_norm: RMSNorm
    q_b: nn.Linear
    kv_a: nn.Linear
    kv_a_norm: RMSNorm
    kv_b: nn.Linear
    o: nn.Linear

    def __init__(self, spec: ModelSpec, rope: Rope, layer: str) -> None:
        super().__init__()
        self.nope, self.turned, self.value = (
            spec.qk_nope_head_dim,
            spec.qk_rope_head_dim,
            spec.v_head_dim,
        )
        self.core_dim, self.rank = spec.core_dim, spec.kv_lora_rank
        self.q = self.q_a = None
        for projection in attention_linears(spec):
            if projection.norm is not None:
                norm = RMSNorm(projection.inner[0], LATENT_EPS)
                setattr(self, projection.norm.rpartition(".")[2], norm)
            add_linears(self, spec, [projection])
        self.query_scale = spec.query_scale
        self.interleaves = spec.rope_interleave
        self.scores = ScoreBounds.of(spec, spec.layer(int(layer)))
        self.rope = rope
        self.table = rope.index(int(layer))
        self.layer = layer
        self.core: Core = attend
        self.project: Project = each

    def forward(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        """Return the attention sublayer's output for `x` `[batch, seq, dim]`, of the same shape."""
        cache = context.cache
        into = self.q if self.q_a is None else self.q_a
        assert into is not None
        q, projected = self.project(x, (into, self.kv_a), context)
        if self.q_a is not None:
            q = apply(self.q_b, self.q_a_norm(q), context)
        latent, shared = torch.split(projected, [self.rank, self.turned], -1)
        latent, shared = self.kv_a_norm(latent), shared[:, :, None]
        q = q.view(*q.shape[:-1], -1, self.nope + self.turned)
        plain, turned = torch.split(q, [self.nope, self.turned], -1)
        if self.table is not None:
            start = 0 if cache is None else cache.length
            where = start, start + q.shape[1], context.positions
            cos, sin = self.rope.tables(*where, self.table, context.is_long)
            turned, shared = self._rotated(turned, cos, sin), self._rotated(shared, cos, sin)
        if cache is not None:
            latent, shared = cache.append(self.layer, latent[:, None], shared.transpose(1, 2))
            latent, shared = latent[:, 0], shared.transpose(1, 2)
        q = self._filled(plain, turned)
        if self.query_scale != 1.0:
            q = q * self.query_scale
        k, v = self._keys_and_values(latent, shared, context)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        mixed = self.core(q, k, v, context.mask, self.scores, None).transpose(1, 2)
        return apply(self.o, mixed[..., : self.value].flatten(2), context)

    def _keys_and_values(
        self, latent: Tensor, shared: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Compute keys and values `[batch, seq, heads, core_dim]` from latent vectors and the
        shared key.
        """
        heads = apply(self.kv_b, latent, context)
        heads = heads.view(*heads.shape[:-1], -1, self.nope + self.value)
        keys, values = torch.split(heads, [self.nope, self.value], -1)
        shared_keys = shared.expand(-1, -1, keys.shape[2], -1)
        return self._filled(keys, shared_keys), self._filled(values)

    def _filled(self, *parts: Tensor) -> Tensor:
        """Concatenate parts of heads along the last dim, and pad with zeros up to `core_dim`."""
        room = self.core_dim - sum(part.shape[-1] for part in parts)
        if not room:
            return torch.cat(parts, -1)
        return F.pad(parts[0] if len(parts) == 1 else torch.cat(parts, -1), (0, room))

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply rotary embeddings to heads `[batch, seq, heads, rope_dim]`.

        Interleaved pairs of dims are first reordered to the layout of `rotate`.
        """
        if self.interleaves:
            x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
        return rotate(x.transpose(1, 2), cos, sin).transpose(1, 2)
