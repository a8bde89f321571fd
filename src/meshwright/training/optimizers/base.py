"""Shared by optimizer builders: parameter groups with one update rule and settings each."""

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
        """Return the group as a dict for torch's optimizers; `set_learning_rate` reads
        `lr_scale`.
        """
        return {"params": list(self.parameters), **self.settings._asdict()}


Builder = Callable[[Sequence[ParameterGroup], OptimizerSpec, WholeMatrices], torch.optim.Optimizer]
"""Makes an optimizer, which may gather whole matrices of shards.

Its `step` reads `grad_scale` and `found_inf` as torch's fused ones do.
"""


def unscaled_gradients(
    weights: Sequence[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """Divide gradients by `grad_scale` in place; return them, and 1 if the step updates, else 0.

    The factor is fp64 `[]`, so that products with it round as Python's numbers do; it is 0 if
    `found_inf` is 1, and then all gradients are zeros. Weights without a gradient get zeros.
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
    """Yield views of the same rows of equally shaped tensors, a bounded number of rows at a
    time.
    """
    rows = rows_of_piece(tensors[0][:1].numel())
    yield from zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
