"""Muon for hidden matrices, AdamW for everything else, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from meshwright.parallel.data_parallel.matrices import WholeMatrices
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizers.adamw import of_groups
from meshwright.training.optimizers.base import (
    ParameterGroup,
    Scaling,
    count_update,
    place_to_round,
    update_in_pieces,
)

# Keller Jordan's quintic polynomial, as torch.optim.Muon has it.
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_EPS: Final = 1e-7
_DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build(
    groups: Sequence[ParameterGroup], spec: OptimizerSpec, matrices: WholeMatrices
) -> torch.optim.Optimizer:
    """Return Muon for hidden matrices, with AdamW for the groups of other parameters."""
    return Muon(groups, spec, matrices)


class Muon(torch.optim.Optimizer):
    """Muon on whole matrices, of which this rank may hold shards, beside AdamW.

    Both keep their states in `state` and their settings in `param_groups`. Like torch's fused
    optimizers, it takes `grad_scale` and `found_inf` as tensors that the host does not read.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, groups: Sequence[ParameterGroup], spec: OptimizerSpec, matrices: WholeMatrices
    ) -> None:
        super().__init__([group.as_torch() for group in groups], {"lr": spec.lr})
        self._spec, self._matrices = spec, matrices
        pairs = list(zip(groups, self.param_groups, strict=True))
        self._own = [group for rule_group, group in pairs if rule_group.rule.needs_matrix]
        other_groups = [group for rule_group, group in pairs if not rule_group.rule.needs_matrix]
        self._adamw: torch.optim.Optimizer | None = None
        if other_groups:
            self._adamw = of_groups(other_groups, spec, matrices)
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights; a collective of the ranks that have shards of the same matrices."""
        if self._adamw is not None:
            scaled: Any = self._adamw
            scaled.grad_scale, scaled.found_inf = self.grad_scale, self.found_inf
            self._adamw.step()
        for group in self._own:
            for weight in group["params"]:
                self._update(weight, group["lr"], group["weight_decay"])

    def _update(self, weight: Tensor, lr: float, weight_decay: float) -> None:
        """Update a weight by its orthogonalized momentum; not if gradients overflowed."""
        spec, state = self._spec, self.state[weight]
        scaling = Scaling.of(self, weight.device)
        # All ranks gather: one without a gradient has zeros.
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight, dtype=torch.float32)
        step = count_update(state, spec, scaling.moves, weight.device)
        direction = torch.empty_like(weight, dtype=_DTYPES[spec.ns_precision])
        average = partial(_average_piece, scaling, spec)
        averaged = {"momentum_buffer": state["momentum_buffer"]}
        update_in_pieces(average, gradient, averaged, unwidened=[direction])
        update, shape = self._orthogonal(weight, direction)
        place = place_to_round(weight, spec, self._matrices)
        factors = lr * weight_decay * scaling.moves, lr * scale_of(spec, shape) * scaling.moves
        update_in_pieces(partial(_move_piece, *factors), update, {"weight": weight}, place, step)

    def _orthogonal(self, weight: Tensor, direction: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return this rank's shard of an orthogonalized matrix, and the matrix's shape."""
        matrix = self._matrices.whole(weight, direction)
        orthogonal = orthogonalize(matrix, self._spec.ns_steps)
        shape = matrix.shape[-2], matrix.shape[-1]
        return self._matrices.shard(weight, orthogonal).to(weight.device), shape


def _average_piece(
    scaling: Scaling, spec: OptimizerSpec, change: Tensor, average: Tensor, direction: Tensor
) -> None:
    """Update some rows of a momentum, and write the `direction` that they give."""
    average.lerp_(scaling.unscale(change), ((1 - spec.momentum) * scaling.moves).to(average.dtype))
    direction.copy_(change.lerp_(average, spec.momentum) if spec.nesterov else average)


def _move_piece(decay: Tensor, rate: Tensor, update: Tensor, rows: Tensor) -> None:
    """Shrink some rows of a weight, and take off their share of an `update`; all fp32."""
    rows.mul_(1 - decay)
    rows.sub_(update.mul_(rate))


def scale_of(spec: OptimizerSpec, shape: tuple[int, int]) -> float:
    """Return Muon's learning-rate factor for a matrix of the shape (rows, columns)."""
    rows, columns = shape
    if spec.scale == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return an approximation of the nearest orthogonal matrix, by Newton-Schulz iterations.

    `matrix` `[..., rows, columns]` is overwritten. Singular values come to lie between 0.5 and 1.5.
    """
    if matrix.numel() == 0:
        return matrix
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    product = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    near = matrix.mT if is_tall else matrix
    near.div_(near.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS))
    for _ in range(steps):
        gram = near @ near.mT
        near = product(near, product(gram, gram, gram, beta=b, alpha=c), near, beta=a)
    return near.mT if is_tall else near
