"""Causal self-attention with grouped keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.models import blockwise, flex
from meshwright.models.context import PLAIN, Context
from meshwright.models.lora import add_linears, apply
from meshwright.models.norms import RMSNorm, head_norm, norm_pair
from meshwright.models.ops import rotate, sigmoid_gated
from meshwright.models.plain_attention import band, plainly
from meshwright.models.rope import Rope
from meshwright.program.attention import UNBOUNDED, ScoreBounds
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import attention_linears

# q [batch, heads, seq, head_dim], k and v [batch, kv_heads, seq, head_dim], mask or None, bounds of
# scores, sinks [heads] or None -> as q
Core = Callable[[Tensor, Tensor, Tensor, Tensor | None, ScoreBounds, Tensor | None], Tensor]
# x [..., in], linear layers that all take it, and what adapters need beside it -> their results
Project = Callable[[Tensor, Sequence[nn.Linear], Context], Sequence[Tensor]]
# q and k [batch, seq, heads * head_dim], their norms over all heads -> both
NormPair = Callable[[Tensor, Tensor, RMSNorm, RMSNorm], tuple[Tensor, Tensor]]


def each(x: Tensor, layers: Sequence[nn.Linear], context: Context) -> Sequence[Tensor]:
    """Return the outputs of linear layers that all take the input `x`, in the order of `layers`."""
    return [apply(layer, x, context) for layer in layers]


def _same(x: Tensor) -> Tensor:
    return x


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scores: ScoreBounds = UNBOUNDED,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention, or attention where `mask` (bool, broadcast) is true.

    The last query is at the position of the last key. The sliding window and soft cap of `scores`
    apply in addition to the mask. `sinks` `[heads]`: attention sinks; None: the model has none.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    scores = scores.within(keys)
    # A single query is the newest position: it sees all keys. A branch, as there is no plain
    # bool here in code that is compiled for any length.
    if mask is None and queries > 1 and queries == keys:
        return _causal(q, k, v, scores, sinks)
    window = scores.window
    if window is not None and queries + window <= keys:
        seen = queries + window - 1  # by any of the queries: the last keys
        k, v = k[:, :, -seen:], v[:, :, -seen:]
        mask = None if mask is None else mask[..., -seen:]
    if queries > 1 and (mask is None or window is not None):
        near = band(q, k.shape[-2], window)
        mask = near if mask is None else mask & near
    return _masked(q, k, v, mask, scores.cap, sinks)


def _causal(q: Tensor, k: Tensor, v: Tensor, scores: ScoreBounds, sinks: Tensor | None) -> Tensor:
    """Return causal attention for as many queries as keys, by the fastest kernel that can do it."""
    if blockwise.takes(q, k, scores):
        bounds = scores.window or 0, scores.cap or 0.0
        out: Tensor = blockwise.attention(q, k, v, *bounds, sinks)[0]
        return out
    if scores == UNBOUNDED:
        return _by_kernel(q, k, v, is_causal=True)
    if flex.takes(q.device, q.dtype, q.shape[-1]):
        return flex.attention(q, k, v, scores, sinks)
    return _masked(q, k, v, band(q, k.shape[-2], scores.window), scores.cap, sinks)


def _by_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False
) -> Tensor:
    """Return attention by torch's `scaled_dot_product_attention`.

    On a GPU, torch falls back to storing all scores in fp32 or with a mask if there are fewer key
    heads than query heads: there, key and value heads are repeated first.
    """
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.device.type == "cuda" and (q.dtype == torch.float32 or mask is not None):
        k, v, grouped = spread(k, q.shape[1]), spread(v, q.shape[1]), False
    kernel = F.scaled_dot_product_attention
    return kernel(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)


def spread(x: Tensor, heads: int) -> Tensor:
    """Return `x` `[batch, kv_heads, seq, head_dim]` with its heads repeated to `heads` heads."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention where `mask` is true; None: each query attends to all keys."""
    if cap is None and sinks is None:
        return _by_kernel(q, k, v, mask)
    return plainly(q, k, v, mask, cap, sinks)


class Attention(nn.Module):
    """Multi-head attention: projections q, k, v and o around `core`, the scores and the softmax.

    With `gate`, a fourth projection of the input, the sigmoid of that projection multiplies the
    input of `o`. Context parallelism may replace `core`. Tensor parallelism may replace `project`,
    which computes all projections but `o`, `norm_pair`, which normalizes queries and keys over all
    heads, and `local`, which returns this rank's sinks. The number of heads follows from the width
    of the projections' outputs, so a rank may have a part of the heads.
    """

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    gate: nn.Linear | None
    o: nn.Linear
    sinks: nn.Parameter | None

    def __init__(self, spec: ModelSpec, rope: Rope, layer: str) -> None:
        super().__init__()
        add_linears(self, spec, attention_linears(spec))
        if not spec.attention_gate:
            self.gate = None
        self.sinks = nn.Parameter(torch.empty(spec.n_heads)) if spec.attention_sinks else None
        self.q_norm, self.k_norm = (head_norm(spec, n) for n in (spec.n_heads, spec.n_kv_heads))
        self.norms_all = spec.qk_norm == "all"
        self.head_dim = spec.head_dim
        self.query_scale = spec.query_scale
        self.interleaves = spec.rope_interleave
        self.scores = ScoreBounds.of(spec, spec.layer(int(layer)))
        self.rope = rope
        self.table = rope.index(int(layer))
        self.layer = layer
        self.core: Core = attend
        self.project: Project = each
        self.norm_pair: NormPair = norm_pair
        self.local: Callable[[Tensor], Tensor] = _same

    def forward(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        """Return the attention sublayer's output for `x` `[batch, seq, dim]`, of the same shape."""
        cache = context.cache
        gated = () if self.gate is None else (self.gate,)
        q, k, v, *gate = self.project(x, (self.q, self.k, self.v, *gated), context)
        if self.norms_all and self.q_norm is not None and self.k_norm is not None:
            q, k = self.norm_pair(q, k, self.q_norm, self.k_norm)
        q, k, v = map(self._heads, (q, k, v))
        if not self.norms_all and self.q_norm is not None and self.k_norm is not None:
            # Before the transpose: a GPU's kernel makes its result contiguous, and attention's
            # result has the memory order of q. `o` would copy one with heads before positions.
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        if self.query_scale != 1.0:
            q = q * self.query_scale
        if self.table is not None:
            start = 0 if cache is None else cache.length
            where = start, start + q.shape[2], context.positions
            cos, sin = self.rope.tables(*where, self.table, context.is_long)
            q, k = (rotate(heads, cos, sin, self.interleaves) for heads in (q, k))
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        sinks = None if self.sinks is None else self.local(self.sinks)
        mixed = self.core(q, k, v, context.mask, self.scores, sinks).transpose(1, 2).flatten(2)
        if gate:
            mixed = sigmoid_gated(mixed, gate[0])
        return apply(self.o, mixed, context)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim)
