"""What a builder of an optimizer gets: parameters in groups, of one rule and settings each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.parallel.data_parallel.matrices import WholeMatrices
from meshwright.program.optimizer import Settings
from meshwright.spec.optimizers import UpdateRule, rows_of_piece
from meshwright.spec.training import OptimizerSpec


class ParameterGroup(NamedTuple):
    """Parameters, or shards of them, that one rule updates with the same settings."""

    rule: UpdateRule
    settings: Settings
    parameters: Sequence[nn.Parameter]

    def as_torch(self) -> dict[str, Any]:
        """Return the group as torch's optimizers take it; `set_learning_rate` reads `lr_scale`."""
        return {"params": list(self.parameters), **self.settings._asdict()}


Builder = Callable[[Sequence[ParameterGroup], OptimizerSpec, WholeMatrices], torch.optim.Optimizer]
"""Makes an optimizer, which may gather whole matrices of shards.

Its `step` reads `grad_scale` and `found_inf` as torch's fused ones do.
"""


def unscaled_gradients(
    weights: Sequence[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """Return gradients divided by `grad_scale`, in place, and whether the step moves weights.

    The latter is fp64 `[]`, so that factors round as numbers of Python do: 0 where `found_inf` is
    1, else 1. Gradients of a step that moves nothing are zeros, as are those of weights without.
    """
    device = weights[0].device
    skips = torch.zeros((), device=device) if found_inf is None else found_inf
    gradients = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights
    ]
    if grad_scale is not None:
        torch._foreach_div_(gradients, grad_scale)
    for gradient in gradients:
        gradient.masked_fill_(skips.bool(), 0)  # what is not finite stays so times zero
    return gradients, 1 - skips.double()


def in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of tensors of one shape, as views, a piece of bounded size at a time."""
    rows = rows_of_piece(tensors[0][:1].numel())
    yield from zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
