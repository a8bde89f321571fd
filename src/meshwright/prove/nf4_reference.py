"""Frozen weights in NF4, as the reference model computes with them.

Shares no code with `models.nf4`: each number of a block becomes the nearest level.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.models.nf4 import LEVELS
from meshwright.spec.lora import NF4_BLOCK
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import parts


def in_nf4(weight: Tensor) -> Tensor:
    """Return a weight `[out, in]` after a round trip through NF4: each number becomes the nearest
    level times the largest absolute value of its block.
    """
    rounded = torch.empty_like(weight)
    levels = torch.tensor(LEVELS)
    for row, rounded_row in zip(weight.float(), rounded, strict=True):
        for block, to in zip(row.split(NF4_BLOCK), rounded_row.split(NF4_BLOCK), strict=True):
            largest = block.abs().max()
            if largest > 0:
                nearest = (block[:, None] / largest - levels).abs().argmin(-1)
                to.copy_(levels[nearest] * largest)
            else:
                to.zero_()
    return rounded


def kept_in_nf4(
    spec: ModelSpec, weights: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return all weights, fp32 by name, with those that a run keeps in NF4 rounded to `dtype` and
    then to NF4.
    """
    packed = {part.name for part in parts(spec) if part.is_nf4}
    return {
        name: in_nf4(weight.to(dtype)).float() if name in packed else weight
        for name, weight in weights.items()
    }
