"""What a builder of an optimizer gets: parameters in groups, each with one rule and one decay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.parallel.data_parallel.matrices import WholeMatrices
from meshwright.spec.optimizers import UpdateRule
from meshwright.spec.training import OptimizerSpec


class ParameterGroup(NamedTuple):
    """Parameters, or shards of them, that one rule updates with one weight decay."""

    rule: UpdateRule
    weight_decay: float
    parameters: Sequence[nn.Parameter]

    def as_torch(self) -> dict[str, Any]:
        """Return the group as torch's optimizers take it."""
        return {"params": list(self.parameters), "weight_decay": self.weight_decay}


Builder = Callable[[Sequence[ParameterGroup], OptimizerSpec, WholeMatrices], torch.optim.Optimizer]
"""Makes an optimizer, which may gather whole matrices of shards.

Its `step` reads `grad_scale` and `found_inf` as torch's fused ones do.
"""
