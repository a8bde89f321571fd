"""AdamW as torch has it, fused."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.parallel.data_parallel.matrices import WholeMatrices
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizers.base import ParameterGroup


def build(
    groups: Sequence[ParameterGroup], spec: OptimizerSpec, matrices: WholeMatrices
) -> torch.optim.Optimizer:
    """Return torch's fused AdamW."""
    return torch.optim.AdamW(
        [group.as_torch() for group in groups],
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        fused=True,
    )
