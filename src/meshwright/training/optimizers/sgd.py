"""SGD with decoupled weight decay, like AdamW's."""

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
    """Return SGD, with momentum if the config has one."""
    return DecoupledSGD([group.as_torch() for group in groups], spec, matrices)


class DecoupledSGD(torch.optim.SGD):
    """SGD whose weight decay is decoupled from the gradient, as in AdamW.

    Like torch's fused optimizers, it takes `grad_scale` and `found_inf` as tensors that the host
    does not read. torch's own fused SGD leaves its momentum undefined where the first step is
    skipped.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], spec: OptimizerSpec, matrices: WholeMatrices
    ) -> None:
        super().__init__(groups, lr=spec.lr, momentum=spec.momentum)
        self._spec, self._matrices = spec, matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._descend(weight, weight.grad, group)

    def _descend(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        scaling, state = Scaling.of(self, weight.device), self.state[weight]
        updated = {"weight": weight}
        if group["momentum"]:
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(weight, dtype=torch.float32)
            updated["momentum_buffer"] = state["momentum_buffer"]
        step = count_update(state, self._spec, scaling.moves, weight.device)
        place = place_to_round(weight, self._spec, self._matrices)
        update = partial(_descend_piece, scaling, group)
        update_in_pieces(update, gradient, updated, place, step)


def _descend_piece(
    scaling: Scaling,
    group: dict[str, Any],
    change: Tensor,
    rows: Tensor,
    average: Tensor | None = None,
) -> None:
    """Update some rows of a weight and of its momentum, all fp32."""
    moves = scaling.moves.float()
    scaling.unscale(change)
    if group["weight_decay"]:
        rows.mul_(1 - group["lr"] * group["weight_decay"] * moves)
    if average is None:
        rows.add_(change, alpha=-group["lr"])
        return
    average.mul_(group["momentum"] * moves + (1 - moves)).add_(change)
    rows.addcmul_(average, moves, value=-group["lr"])
