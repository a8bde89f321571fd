"""Experts over the ranks of tp: each has a part of every expert's width, and sees all tokens.

The router and the shared expert are inside the same region: one message brings the stream in and
one takes the sum of all out, as with an MLP. What a rank makes of the router's gradient is a part
of a sum over tp, since it has seen a part of each expert's result. The bias of what experts give is
added on the first rank.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from meshwright.execute.tensor_parallel.deferred import ALONE, Deferral, defer, local
from meshwright.execute.tensor_parallel.tensor import ColumnLinear, together
from meshwright.execute.tensor_parallel.tp_regions import TPRegion
from meshwright.models.experts import ExpertMLP, Make, Matrices


def cut_experts(mlp: ExpertMLP, tp_region: TPRegion, deferral: Deferral) -> None:
    """Have the parameters of experts cut over tp, and their gradients made later where asked."""
    for module in mlp.modules():
        if isinstance(module, Matrices):
            module.local, module.made = local, partial(_made, deferral)
        elif isinstance(module, nn.Linear):
            ColumnLinear.take_over(module, ALONE, deferral)
    if mlp.shared is not None:
        mlp.shared.project = together(ALONE, deferral)
    mlp.experts.adds = tp_region.link.rank == 0  # once, to the sum of what the ranks make
    if tp_region.link.size > 1:
        mlp.enter, mlp.leave = tp_region.enter, tp_region.leave


def _made(deferral: Deferral, owner: Tensor, make: Make) -> Tensor | None:
    """Return a gradient, or note how to make it."""
    if deferral.pending is None:
        return make()
    deferral.pending.append(partial(defer, owner, make))
    return None
