"""Tensor parallelism of a model with low-rank adapters, whose base weights are frozen.

An adapter is sharded like its layer: for a column-parallel layer, B is sharded by rows and A is
whole; for a row-parallel one, A is sharded by columns and B is whole. B multiplies before the end
of the region, so one all-reduce sums both outputs, and nothing else is sent. The gradient of a
whole matrix is a partial sum over tp, because the other matrix of its adapter is sharded.

Adapters of experts are sharded in the same way, along each expert's width, and so are those of the
shared expert in the same region; `layout.ep` divides them like the experts.

With frozen weights, there are no weight gradients to overlap with the all-reduce of input
gradients: layers enter a region together, and autograd does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from meshwright.models.attention import Project
from meshwright.models.blocks import Block
from meshwright.models.context import PLAIN, Context
from meshwright.models.experts import ExpertMLP
from meshwright.models.latent import LatentAttention
from meshwright.models.lora import LoraLinear
from meshwright.models.nf4 import product
from meshwright.models.routers import Matrices
from meshwright.parallel.tensor_parallel.deferred import local
from meshwright.parallel.tensor_parallel.tensor import enter_experts
from meshwright.parallel.tensor_parallel.tp_regions import TPRegion


def cut_adapted(block: Block, tp_region: TPRegion, *, folds: bool) -> None:
    """Shard a block's linear layers and their adapters over tp.

    `folds`: experts stay whole, see `expert_parallel.experts`.
    """
    block.attn.project = entering(tp_region)
    rows, inside = [block.attn.o], list[nn.Linear]()
    if isinstance(block.attn, LatentAttention):
        inside += [block.attn.kv_b, *([] if block.attn.q_a is None else [block.attn.q_b])]
    if isinstance(block.mlp, ExpertMLP):
        inside += _cut_experts(block.mlp, tp_region, folds=folds)
    else:
        block.mlp.project = entering(tp_region)
        rows.append(block.mlp.down)
    for module in block.modules():
        if isinstance(module, LoraLinear | Matrices):
            module.local = local
    for layer in inside:
        if not isinstance(layer, LoraLinear):
            layer.__class__ = FrozenInside
    for row in rows:
        assert isinstance(row, nn.Linear)
        kind = RowLora if isinstance(row, LoraLinear) else FrozenRow
        row.__class__ = kind
        assert isinstance(row, RowLora | FrozenRow)
        row.tp_region = tp_region


def _cut_experts(mlp: ExpertMLP, tp_region: TPRegion, *, folds: bool) -> list[nn.Linear]:
    """Move experts, router and shared expert into the region; return the linear layers there."""
    enter_experts(mlp, tp_region, folds=folds)
    if mlp.shared is not None and isinstance(mlp.shared.down, LoraLinear):
        mlp.shared.down.part = tp_region.link.rank
    return [module for module in mlp.modules() if isinstance(module, nn.Linear)]


def entering(tp_region: TPRegion) -> Project:
    """Return a replacement of `models.attention.each`, whose input enters the region once."""

    def project(x: Tensor, layers: Sequence[nn.Linear], context: Context) -> Sequence[Tensor]:
        inside = tp_region.enter(x)
        return [_column(layer, inside, context) for layer in layers]

    return project


def _column(layer: nn.Linear, x: Tensor, context: Context) -> Tensor:
    """Return this rank's outputs `[batch, seq, out / ranks]` for x `[batch, seq, in]`."""
    bias = None if layer.bias is None else local(layer.bias)
    out = product(layer, x, local(layer.weight), bias)
    return layer.added(out, x, context) if isinstance(layer, LoraLinear) else out


class FrozenInside(nn.Linear):
    """A frozen linear layer inside of a region, with this rank's shard of its outputs or inputs."""

    def forward(self, input: Tensor) -> Tensor:
        """Return outputs `[..., out / ranks]`, or partial sums `[..., out]` of a row-parallel
        layer.
        """
        return product(self, input, local(self.weight), None)


class FrozenRow(nn.Linear):
    """A frozen row-parallel linear layer: sums partial outputs over tp, then adds the bias."""

    tp_region: TPRegion

    def forward(self, input: Tensor) -> Tensor:
        """Return `[batch, seq or its shard, out]` for `input` `[batch, seq, in / tp]`."""
        return _left(self, product(self, input, local(self.weight), None), self.tp_region)


class RowLora(LoraLinear):
    """A row-parallel linear layer with an adapter, whose A has the columns of this rank's
    inputs.
    """

    tp_region: TPRegion

    def forward(self, input: Tensor, context: Context = PLAIN) -> Tensor:
        """Return `[batch, seq or its shard, out]` for `input` `[batch, seq, in / tp]`."""
        first = self.tp_region.link.rank * input.shape[-1]
        partial = product(self, input, local(self.weight), None)
        out = self.added(partial, input, context, first)
        return _left(self, out, self.tp_region)


def _left(layer: nn.Linear, partial: Tensor, tp_region: TPRegion) -> Tensor:
    out = tp_region.leave(partial)
    return out if layer.bias is None else out + local(layer.bias).to(out.dtype)
