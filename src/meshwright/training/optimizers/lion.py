"""Lion: each element moves by the learning rate, in the direction of a momentum's sign."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.parallel.data_parallel.matrices import WholeMatrices
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizers.base import ParameterGroup, in_pieces, unscaled_gradients


def build(
    groups: Sequence[ParameterGroup], spec: OptimizerSpec, matrices: WholeMatrices
) -> torch.optim.Optimizer:
    """Return Lion over the groups."""
    return Lion([group.as_torch() for group in groups], {"lr": spec.lr, "betas": spec.betas})


class Lion(torch.optim.Optimizer):
    """Lion, arXiv:2302.06675, algorithm 2: one momentum with two interpolation factors.

    Like torch's fused optimizers, it takes `grad_scale` and `found_inf` as tensors that the host
    does not read.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._update(weights, group["lr"], group["weight_decay"], group["betas"])

    def _update(
        self, weights: list[Tensor], lr: float, weight_decay: float, betas: tuple[float, float]
    ) -> None:
        gradients, moves = unscaled_gradients(weights, self.grad_scale, self.found_inf)
        beta1, beta2 = betas
        for weight, gradient in zip(weights, gradients, strict=True):
            state = self.state[weight]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(weight)
            if weight_decay:
                weight.mul_(1 - lr * weight_decay * moves)
            for rows, change, average in in_pieces(weight, gradient, state["exp_avg"]):
                direction = average.lerp(change, 1 - beta1).sign_()
                rows.addcmul_(direction, moves.to(rows.dtype), value=-lr)
                del direction  # the next piece's would lie beside it
                average.lerp_(change, ((1 - beta2) * moves).to(average.dtype))
