"""AdamW as torch has it, fused, or with moments in 16 or 8 bits, or weights in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from meshwright.parallel.data_parallel.int8_states import add_state, part_of
from meshwright.parallel.data_parallel.matrices import WholeMatrices
from meshwright.spec.optimizers.adamw import ADAMW_RULE
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizers.base import ParameterGroup, place_to_round, update_in_pieces


def build(
    groups: Sequence[ParameterGroup], spec: OptimizerSpec, matrices: WholeMatrices
) -> torch.optim.Optimizer:
    """Return torch's fused AdamW, or one that keeps moments or weights in fewer bits."""
    return of_groups(
        [{**group.as_torch(), "states": group.rule.states(spec)} for group in groups],
        spec,
        matrices,
    )


def of_groups(
    groups: list[dict[str, Any]], spec: OptimizerSpec, matrices: WholeMatrices
) -> torch.optim.Optimizer:
    """Return AdamW for groups as torch's optimizers take them, which it keeps."""
    settings: dict[str, Any] = {"lr": spec.lr, "betas": spec.betas, "eps": spec.eps}
    weights = (weight for group in groups for weight in group["params"])
    if spec.state_dtype == "fp32" and all(weight.dtype == torch.float32 for weight in weights):
        return torch.optim.AdamW(groups, **settings, fused=True)
    return NarrowAdamW(groups, settings, spec, matrices)


class NarrowAdamW(torch.optim.Optimizer):
    """AdamW whose moments or weights are kept in fewer bits, and updated in fp32.

    torch's fused kernel updates fp32 copies of them, a piece of a weight at a time, which are then
    rounded. It takes `grad_scale` and `found_inf` as torch's fused optimizers do: tensors that
    nobody reads.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        settings: dict[str, Any],
        spec: OptimizerSpec,
        matrices: WholeMatrices,
    ) -> None:
        super().__init__(groups, {**settings, "states": ADAMW_RULE.states(spec)})
        self._spec, self._matrices = spec, matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        moments = [moment for moment in group["states"] if not moment.is_number]
        if "step" not in state:
            state["step"] = torch.zeros((), device=weight.device)
            for moment in moments:
                add_state(state, moment, weight)
        step, before = state["step"], state["step"].clone()
        updated = {"weight": weight, **{moment.key: part_of(state, moment) for moment in moments}}
        place = place_to_round(weight, self._spec, self._matrices)
        update = partial(self._update_piece, step, before, group)
        update_in_pieces(update, gradient, updated, place, step)

    def _update_piece(
        self, step: Tensor, before: Tensor, group: dict[str, Any], *piece: Tensor
    ) -> None:
        """Update some rows of a weight and of its moments, all fp32."""
        change, rows, mean, square = piece
        step.copy_(before)  # each piece counts the update
        adamw(
            [rows],
            [change],
            [mean],
            [square],
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
