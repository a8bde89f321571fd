"""The weights that one device multiplies with where a run keeps them in four bits.

Written apart from `models.nf4`: each number of a block becomes the level that is nearest to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.models.nf4 import LEVELS
from meshwright.spec.lora import NF4_BLOCK
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import parts


def in_nf4(weight: Tensor) -> Tensor:
    """Return a weight `[out, in]` of which each number is a level times its block's largest."""
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
    """Return weights, fp32, of which those kept in four bits are what products in `dtype` take."""
    packed = {part.name for part in parts(spec) if part.is_nf4}
    return {
        name: in_nf4(weight.to(dtype)).float() if name in packed else weight
        for name, weight in weights.items()
    }
