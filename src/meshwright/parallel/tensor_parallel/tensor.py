"""Tensor and sequence parallelism: the linear layers and the embedding over tp ranks.

Megatron-LM, arXiv:1909.08053, section 3, and arXiv:2205.05198, section 4.2 for the sequence. The
parameters are DTensors sharded over tp; activations are plain local tensors, which enter and leave
through a `tp_region`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.comm.groups import Link
from meshwright.models.attention import NormPair, Project
from meshwright.models.context import Context
from meshwright.models.experts import ExpertMLP
from meshwright.models.latent import LatentAttention
from meshwright.models.mamba import Mamba2
from meshwright.models.norms import RMSNorm
from meshwright.models.ops import factor, returned, widened
from meshwright.parallel.tensor_parallel.deferred import ALONE, Deferral, linear, linears, local
from meshwright.parallel.tensor_parallel.tp_regions import TPRegion, all_reduce


class ColumnLinear(nn.Linear):
    """A column-parallel linear layer: each rank computes its outputs from the whole input.

    It also replaces any linear layer whose weight gradient may be deferred; without tp, its output
    is whole.
    """

    tp_region: TPRegion
    deferral: Deferral

    @classmethod
    def take_over(cls, module: nn.Linear, tp_region: TPRegion, deferral: Deferral) -> None:
        """Turn a linear layer into this class, in place: its parameters keep their names."""
        module.__class__ = below(type(module), cls)
        assert isinstance(module, ColumnLinear)
        module.tp_region, module.deferral = tp_region, deferral

    def forward(self, input: Tensor) -> Tensor:
        """Return `[batch, seq, out / ranks]` for `input` `[batch, seq or its shard, in]`."""
        return linears(input, (self.weight,), (self.bias,), self.deferral, self.tp_region)[0]


class RowLinear(ColumnLinear):
    """A row-parallel linear layer: sums partial outputs over tp, then adds the bias."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `[batch, seq or its shard, out]` for `input` `[batch, seq, in / ranks]`."""
        out = self.tp_region.leave(linear(input, self.weight, None, self.deferral))
        return out if self.bias is None else out + local(self.bias).to(out.dtype)


class VocabEmbedding(nn.Embedding):
    """A vocabulary-parallel embedding: tokens of other ranks' rows give zeros, then a sum
    over tp.
    """

    tp_region: TPRegion

    @classmethod
    def take_over(cls, module: nn.Embedding, tp_region: TPRegion) -> None:
        """Turn an embedding into this class, in place."""
        module.__class__ = below(type(module), cls)
        assert isinstance(module, VocabEmbedding)
        module.tp_region = tp_region

    def forward(self, input: Tensor) -> Tensor:
        """Return `[batch, seq or its shard, dim]` for int64 ids `[batch, seq]`."""
        weight = local(self.weight)
        first = self.tp_region.link.rank * weight.shape[0]
        local_ids = input - first
        outside = (local_ids < 0) | (local_ids >= weight.shape[0])
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < weight.shape[0]:
            padding = None  # another rank's row
        embedded = F.embedding(local_ids.masked_fill(outside, 0), weight, padding)
        return self.tp_region.leave(embedded.masked_fill(outside[..., None], 0))


def below(kind: Any, cut: Any) -> Any:
    """Return a subclass of the layer class `kind` whose base is the sharded class `cut`.

    Additions of a user's class to the forward of torch's layer, such as a scale, still apply.
    """
    if kind in cut.__mro__ or issubclass(kind, cut):
        return cut
    return type(f"{cut.__name__}{kind.__name__}", (kind, cut), {})


def over_all_heads(link: Link) -> NormPair:
    """Return a replacement of `models.norms.norm_pair` for heads that are sharded over tp."""

    def norm(q: Tensor, k: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> tuple[Tensor, Tensor]:
        weights = local(q_norm.weight), local(k_norm.weight)
        normed: tuple[Tensor, Tensor] = _NormOverRanks.apply(  # type: ignore[no-untyped-call]
            q, k, *weights, q_norm.eps, q_norm.plus_one, link
        )
        return normed

    return norm


def cut_latent(attention: LatentAttention, deferral: Deferral) -> None:
    """Make latent attention compute this rank's heads from whole latent vectors.

    The residual stream enters the region where the latent vectors are computed. A rank's gradients
    of the latent vectors, and of the shared key, are partial sums over its heads.
    """
    inner = [attention.kv_b, *([] if attention.q_a is None else [attention.q_b])]
    for module in inner:
        ColumnLinear.take_over(module, ALONE, deferral)


def cut_groups(mamba: Mamba2, link: Link) -> None:
    """Let Mamba-2 compute this rank's heads, from the keys and queries of their groups.

    Ranks that share a group sum over it in one message with those of other groups.
    """
    _, groups = mamba.groups
    index = link.rank * groups // link.size
    mamba.groups = index, max(groups // link.size, 1)
    if groups % link.size == 0:
        return

    def sums(part: Tensor) -> Tensor:
        spread = F.pad(part, (index, groups - 1 - index))
        return all_reduce(spread, link)[..., index : index + 1]

    mamba.gated_norm.sums = sums


class _NormOverRanks(torch.autograd.Function):
    """RMSNorms of queries and of keys whose features are sharded over ranks, with one all-reduce.

    arXiv:1910.07467, equation 4. Apart from the all-reduce, it is the norm of `models.ops`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        plus_one: bool,
        link: Link,
    ) -> tuple[Tensor, Tensor]:
        sizes = [x.shape[-1] * link.size for x in (q, k)]
        means = [widened(x).square().sum(-1) / size for x, size in zip((q, k), sizes, strict=True)]
        scales = (all_reduce(torch.stack(means), link) + eps).rsqrt_()  # selective keeps the sum
        ctx.save_for_backward(q, k, q_weight, k_weight, scales)
        ctx.plus_one, ctx.link, ctx.sizes = plus_one, link, sizes
        q_out, k_out = (
            returned((widened(x) * scale[..., None]).mul_(factor(weight, plus_one)).to(x.dtype))
            for x, weight, scale in zip((q, k), (q_weight, k_weight), scales, strict=True)
        )
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight, scales = ctx.saved_tensors
        inner, weight_grads, normed = [], [], []
        for x, weight, scale, grad in zip(
            (q, k), (q_weight, k_weight), scales, (q_grad, k_grad), strict=True
        ):
            normed.append(widened(x) * scale[..., None])
            weight_grad = (widened(grad) * normed[-1]).sum((0, 1))
            weight_grads.append(weight_grad.to(weight.dtype))
            inner.append(widened(grad) * factor(weight, ctx.plus_one))
        along = torch.stack([(a * b).sum(-1) for a, b in zip(inner, normed, strict=True)])
        along = all_reduce(along, ctx.link)
        q_back, k_back = (
            gradient.addcmul_(normed_x, share[..., None] / size, value=-1)
            .mul_(scale[..., None])
            .to(x.dtype)
            for gradient, normed_x, share, size, scale, x in zip(
                inner, normed, along, ctx.sizes, scales, (q, k), strict=True
            )
        )
        return q_back, k_back, *weight_grads, None, None, None


def together(tp_region: TPRegion, deferral: Deferral) -> Project:
    """Return a replacement of `models.attention.each`, whose input enters the region once.

    The layers' modules are not called, so hooks on them don't fire.
    """

    def project(x: Tensor, layers: Sequence[nn.Linear], context: Context) -> Sequence[Tensor]:
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        return linears(x, weights, biases, deferral, tp_region)

    return project


def enter_experts(mlp: ExpertMLP, tp_region: TPRegion, *, folds: bool) -> None:
    """Make a mixture of experts compute inside of a region; if it `folds`, only the shared
    expert.
    """
    mlp.folds = folds
    mlp.experts.adds = folds or tp_region.link.rank == 0  # once, to the sum of what the ranks make
    if tp_region.link.size > 1:
        mlp.enter, mlp.leave = tp_region.enter, tp_region.leave
