"""Shared by optimizer builders: parameter groups with one update rule and settings each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.parallel.data_parallel.int8_states import Int8State
from meshwright.parallel.data_parallel.matrices import ShardPlace, WholeMatrices
from meshwright.program.optimizer import Settings
from meshwright.spec.optimizers import UpdateRule, rows_of_piece
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizers.rounding import round_by_place


class ParameterGroup(NamedTuple):
    """Parameters, or shards of them, that one rule updates with the same settings."""

    rule: UpdateRule
    settings: Settings
    parameters: Sequence[nn.Parameter]

    def as_torch(self) -> dict[str, Any]:
        """Return the group as a dict for torch's optimizers; `set_learning_rate` reads
        `lr_scale`.
        """
        return {"params": list(self.parameters), **self.settings._asdict()}


Builder = Callable[[Sequence[ParameterGroup], OptimizerSpec, WholeMatrices], torch.optim.Optimizer]
"""Makes an optimizer, which may gather whole matrices of shards.

Its `step` reads `grad_scale` and `found_inf` as torch's fused ones do.
"""


class Scaling(NamedTuple):
    """What a step divides its gradients by, and whether it `moves` weights: 1, or 0 if not.

    `moves` is fp64 `[]`, so that factors round as numbers of Python do. Nobody reads either.
    """

    divisor: Tensor | None
    moves: Tensor

    @classmethod
    def of(cls, optimizer: Any, device: torch.device) -> Scaling:
        """Return that of an optimizer's `grad_scale` and `found_inf`."""
        found_inf: Tensor | None = optimizer.found_inf
        skips = torch.zeros((), device=device) if found_inf is None else found_inf
        return cls(optimizer.grad_scale, 1 - skips.double())

    def unscale(self, gradient: Tensor) -> Tensor:
        """Divide a gradient in place; that of a step that moves nothing becomes zeros."""
        if self.divisor is not None:
            gradient.div_(self.divisor)
        # What is not finite stays so times zero.
        return gradient.masked_fill_(self.moves == 0, 0)


def update_in_pieces(
    update: Callable[..., object],
    gradient: Tensor,
    updated: Mapping[str, Tensor | Int8State],
    place: ShardPlace | None = None,
    step: Tensor | None = None,
    unwidened: Sequence[Tensor] = (),
) -> None:
    """Call `update` with the same rows of a gradient and of what it changes, in fp32, in turn.

    A piece of bounded size at a time. What is kept in fewer bits comes as a copy, which is rounded
    after the call: to nearest, or to bf16 if `place` says where the shard lies, stochastically, by
    the name in `updated` and the number `step` of updates, `[]`. Rows of `unwidened` come as they
    are.
    """
    rows = rows_of_piece(gradient[:1].numel())
    pieces = (tensor.split(rows) for tensor in (gradient, *updated.values(), *unwidened))
    for change, *row_pieces in zip(*pieces, strict=True):
        narrow = row_pieces[: len(updated)]
        wide = [piece.float() for piece in narrow]
        update(change.float(), *wide, *row_pieces[len(updated) :])
        for key, piece, copy in zip(updated, narrow, wide, strict=True):
            if copy is piece:
                continue
            if place is not None and step is not None and not isinstance(piece, Int8State):
                round_by_place(copy, place, key, step)
            piece.copy_(copy)
        del wide, copy  # the next piece's would lie beside them
        if place is not None:
            place = place.after_rows(len(change))


def place_to_round(
    weight: Tensor, spec: OptimizerSpec, matrices: WholeMatrices
) -> ShardPlace | None:
    """Return where a shard lies, if what is kept of it in bf16 is rounded stochastically."""
    return matrices.place(weight) if spec.rounding == "stochastic" else None


def count_update(
    state: dict[str, Any], spec: OptimizerSpec, moves: Tensor, device: torch.device
) -> Tensor | None:
    """Return the number of updates of a weight with this one, if its rounding depends on it."""
    if spec.rounding != "stochastic":
        return None
    step: Tensor = state.setdefault("step", torch.zeros((), device=device))
    return step.add_(moves)
