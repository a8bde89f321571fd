"""Lion: each element moves by the learning rate, in the direction of a momentum's sign."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.data_parallel.matrices import WholeMatrices
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizers.base import (
    ParameterGroup,
    Scaling,
    count_update,
    place_to_round,
    update_in_pieces,
)


def build(
    groups: Sequence[ParameterGroup], spec: OptimizerSpec, matrices: WholeMatrices
) -> torch.optim.Optimizer:
    """Return Lion."""
    return Lion([group.as_torch() for group in groups], spec, matrices)


class Lion(torch.optim.Optimizer):
    """Lion, arXiv:2302.06675, algorithm 2: one momentum with two interpolation factors.

    Like torch's fused optimizers, it takes `grad_scale` and `found_inf` as tensors that the host
    does not read.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], spec: OptimizerSpec, matrices: WholeMatrices
    ) -> None:
        super().__init__(groups, {"lr": spec.lr, "betas": spec.betas})
        self._spec, self._matrices = spec, matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        scaling, state = Scaling.of(self, weight.device), self.state[weight]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(weight, dtype=torch.float32)
        step = count_update(state, self._spec, scaling.moves, weight.device)
        place = place_to_round(weight, self._spec, self._matrices)
        update = partial(_update_piece, scaling, group)
        updated = {"weight": weight, "exp_avg": state["exp_avg"]}
        update_in_pieces(update, gradient, updated, place, step)


def _update_piece(
    scaling: Scaling, group: dict[str, Any], change: Tensor, rows: Tensor, average: Tensor
) -> None:
    """Update some rows of a weight and of its momentum, all fp32."""
    (beta1, beta2), moves = group["betas"], scaling.moves
    scaling.unscale(change)
    if group["weight_decay"]:
        rows.mul_(1 - group["lr"] * group["weight_decay"] * moves)
    direction = average.lerp(change, 1 - beta1).sign_()
    rows.addcmul_(direction, moves.to(rows.dtype), value=-group["lr"])
    average.lerp_(change, ((1 - beta2) * moves).to(average.dtype))
