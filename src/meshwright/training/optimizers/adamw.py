"""AdamW: torch's fused one, or one with moments in bf16, which take half of the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from meshwright.parallel.data_parallel.matrices import ShardPlace, WholeMatrices
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizers.base import ParameterGroup, in_pieces
from meshwright.training.optimizers.rounding import round_by_place


def build(
    groups: Sequence[ParameterGroup], spec: OptimizerSpec, matrices: WholeMatrices
) -> torch.optim.Optimizer:
    """Return torch's fused AdamW, or for another `state_dtype` than fp32, `NarrowAdamW`."""
    as_torch = [group.as_torch() for group in groups]
    settings: dict[str, Any] = {"lr": spec.lr, "betas": spec.betas, "eps": spec.eps}
    if spec.state_dtype == "fp32":
        return torch.optim.AdamW(as_torch, **settings, fused=True)
    return NarrowAdamW(as_torch, settings, matrices if spec.rounding == "stochastic" else None)


class NarrowAdamW(torch.optim.Optimizer):
    """AdamW whose moments are stored in bf16, and updated and used in fp32.

    torch's fused kernel updates fp32 copies of the moments, some rows of a weight at a time, which
    are then rounded: stochastically with `places`, which says where shards lie, else to nearest.
    Like torch's fused optimizers, it takes `grad_scale` and `found_inf` as tensors that the host
    does not read.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        settings: dict[str, Any],
        places: WholeMatrices | None = None,
    ) -> None:
        super().__init__(groups, settings)
        self._places = places

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if "step" not in state:
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.bfloat16)
        before = state["step"].clone()
        place = None if self._places is None else self._places.place(weight)
        pieces = in_pieces(weight, gradient, state["exp_avg"], state["exp_avg_sq"])
        for piece in pieces:
            state["step"].copy_(before)  # each piece counts the update
            self._update_piece(piece, state["step"], group, place)
            if place is not None:
                place = place.after_rows(len(piece[0]))

    def _update_piece(
        self,
        piece: tuple[Tensor, ...],
        step: Tensor,
        group: dict[str, Any],
        place: ShardPlace | None,
    ) -> None:
        """Update some rows of a weight; a `place` of None rounds their moments to nearest."""
        rows, change, mean, square = piece
        wide_mean, wide_square = mean.float(), square.float()
        adamw(
            [rows],
            [change],
            [wide_mean],
            [wide_square],
            [],
            [step],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if place is not None:
            round_by_place(wide_mean, place, "exp_avg", step)
            round_by_place(wide_square, place, "exp_avg_sq", step)
        mean.copy_(wide_mean)
        square.copy_(wide_square)
