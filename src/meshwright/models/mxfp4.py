"""Weights in MXFP4, as in published gpt-oss files for experts.

Open Compute Project, Microscaling Formats 1.0: blocks of 32 four-bit numbers (E2M1) and a power of
two per block. A byte contains two numbers, the first in its lower half.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 32
# What follows the name of a tensor.
BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"
_BIAS: Final = 127
_HALF: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers `[..., blocks * 32]` in bf16, which represents them exactly.

    blocks uint8 `[..., blocks, 16]`, scales uint8 `[..., blocks]`.
    """
    values = torch.tensor([*_HALF, *(-value for value in _HALF)], dtype=torch.bfloat16)
    pairs = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), -1)
    powers = scales.int().sub_(_BIAS)[..., None, None]
    return torch.ldexp(pairs, powers).to(torch.bfloat16).flatten(-3)
