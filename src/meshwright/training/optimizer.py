"""The optimizer with its parameter groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.spec.parts import Part
from meshwright.spec.training import OptimizerSpec


def build_optimizer(
    parameters: Sequence[nn.Parameter], parts: Sequence[Part], spec: OptimizerSpec
) -> torch.optim.Optimizer:
    """Return AdamW or SGD over parameters or shards of them; `parts` says what each one is.

    Weight decay is decoupled (arXiv:1711.05101) and applies to matrices. Biases, norms and sinks
    are not decayed, and the biases of experts are no matrix: they are a vector for each expert.
    """
    pairs = list(zip(parameters, parts, strict=True))
    decayed = [parameter for parameter, part in pairs if part.is_matrix]
    rest = [parameter for parameter, part in pairs if not part.is_matrix]
    groups = [
        {"params": decayed, "weight_decay": spec.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    # A pipeline rank may have nothing to train: adapters on experts, and only dense layers.
    groups = [group for group in groups if group["params"]] or groups[:1]
    if spec.name == "sgd":
        return _DecoupledSGD(groups, lr=spec.lr, momentum=spec.momentum)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)


class _DecoupledSGD(torch.optim.SGD):
    """SGD whose decay shrinks the weights beside the update, as AdamW's does.

    It takes `grad_scale` and `found_inf` as torch's fused optimizers do: tensors that nobody reads.
    torch's own fused SGD leaves its momentum undefined where the first step is skipped.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [one for one in group["params"] if one.grad is not None]
            if weights:
                self._descend(weights, group)

    def _descend(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        device = weights[0].device
        skips = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        moves = 1 - skips
        changes = [one.grad for one in weights if one.grad is not None]
        if self.grad_scale is not None:
            torch._foreach_div_(changes, self.grad_scale)
        for one in changes:
            one.masked_fill_(skips.bool(), 0)  # what is not finite stays so times zero
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"] * moves)
        momentum = group["momentum"]
        if momentum:
            states = [self.state[one] for one in weights]
            for state, one in zip(states, weights, strict=True):
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(one)
            buffers = [state["momentum_buffer"] for state in states]
            torch._foreach_mul_(buffers, momentum * moves + skips)
            torch._foreach_add_(buffers, changes)
            changes = list(torch._foreach_mul(buffers, moves))
        torch._foreach_add_(weights, changes, alpha=-group["lr"])


def step_scaled(
    optimizer: torch.optim.Optimizer, norm: Tensor, loss_scale: float, clip_norm: float
) -> None:
    """Update with scaled gradients, clipped to a norm (0: no clipping).

    `norm` fp64 `[]` is that of the unscaled gradients; if it is not finite, nothing changes. The
    optimizer receives both like from `torch.amp.GradScaler`, so the host reads neither.
    """
    if held := optimizer.param_groups[0]["params"]:
        norm = norm.to(held[0].device)  # the host's, where shards are there
    divisor = torch.full_like(norm, loss_scale)
    if clip_norm > 0:
        divisor *= (norm / clip_norm).clamp(min=1)
    taken: Any = optimizer
    taken.grad_scale, taken.found_inf = divisor.float(), (~torch.isfinite(norm)).float()
    optimizer.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
