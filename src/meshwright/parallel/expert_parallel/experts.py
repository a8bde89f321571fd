"""Experts over tp ranks: each rank has a part of every expert's width, and sees all tokens.

The router and the shared expert are inside the same tensor-parallel region: one collective brings
the residual stream in and one sums the outputs, as with an MLP. A rank's router gradient is a
partial sum over tp, because it has only a part of each expert's output. The first rank adds the
output bias of experts.

In layouts that fold tp into ep, only the shared expert is sharded over tp: each rank routes its own
tokens to whole experts.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from meshwright.models.experts import ExpertMLP
from meshwright.models.routers import Make, Matrices
from meshwright.parallel.tensor_parallel.deferred import ALONE, Deferral, defer, local
from meshwright.parallel.tensor_parallel.tensor import ColumnLinear, enter_experts, together
from meshwright.parallel.tensor_parallel.tp_regions import TPRegion


def cut_experts(mlp: ExpertMLP, tp_region: TPRegion, deferral: Deferral, *, folds: bool) -> None:
    """Shard the parameters of experts over tp, and defer their gradients if requested."""
    for module in mlp.modules():
        if isinstance(module, Matrices):
            module.local, module.made = local, partial(_made, deferral)
        elif isinstance(module, nn.Linear):
            ColumnLinear.take_over(module, ALONE, deferral)
    if mlp.shared is not None:
        mlp.shared.project = together(ALONE, deferral)
    enter_experts(mlp, tp_region, folds=folds)


def _made(deferral: Deferral, owner: Tensor, make: Make) -> Tensor | None:
    """Compute a weight gradient now, or queue it and return None if gradients are deferred."""
    if deferral.pending is None:
        return make()
    deferral.pending.append(partial(defer, owner, make))
    return None
