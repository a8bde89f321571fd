"""SGD with decoupled weight decay, like AdamW's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.data_parallel.matrices import WholeMatrices
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizers.base import ParameterGroup, unscaled_gradients


def build(
    groups: Sequence[ParameterGroup], spec: OptimizerSpec, matrices: WholeMatrices
) -> torch.optim.Optimizer:
    """Return SGD over the groups, with momentum if the config has one."""
    return DecoupledSGD([group.as_torch() for group in groups], lr=spec.lr, momentum=spec.momentum)


class DecoupledSGD(torch.optim.SGD):
    """SGD whose weight decay is decoupled from the gradient, as in AdamW.

    Like torch's fused optimizers, it takes `grad_scale` and `found_inf` as tensors that the host
    does not read. torch's own fused SGD leaves its momentum undefined where the first step is
    skipped.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._descend(weights, group)

    def _descend(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        changes, moves = unscaled_gradients(weights, self.grad_scale, self.found_inf)
        moves = moves.float()
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"] * moves)
        momentum = group["momentum"]
        if momentum:
            states = [self.state[weight] for weight in weights]
            for state, weight in zip(states, weights, strict=True):
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(weight)
            buffers = [state["momentum_buffer"] for state in states]
            torch._foreach_mul_(buffers, momentum * moves + (1 - moves))
            torch._foreach_add_(buffers, changes)
            for weight, buffer in zip(weights, buffers, strict=True):
                weight.addcmul_(buffer, moves, value=-group["lr"])
        else:
            torch._foreach_add_(weights, changes, alpha=-group["lr"])
