"""Linear layers whose three matmuls are in float8, by torchao, which the extra `fp8` installs.

Each operand is scaled by its current largest value: inputs and weights in e4m3, gradients in e5m2.
arXiv:2209.05433, section 3. Activations between layers, the head and master weights keep
`train.precision`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

import torch
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.program.target import Target

CAPABILITY: Final = (8, 9)  # Ada; Hopper is 9.0


def take_float8(blocks: Iterable[nn.Module], target: Target) -> None:
    """Convert the linear layers of blocks to float8 matmuls, in place; parameter names stay the
    same.

    On a CPU, operands are rounded in the same way, and multiplied in their own dtype. Raises
    `MeshwrightError` if the GPU has no float8 matmuls.
    """
    emulates = target.traits.emulates_float8
    if not emulates and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < CAPABILITY:
            raise MeshwrightError(
                f"train.fp8 = true needs a GPU of compute capability {CAPABILITY} or more, this "
                f"one has {capability}; leave train.fp8 out"
            )
    # It tells of each of its libraries that this torch cannot load: kernels that are not used here.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for block in blocks:
        convert_to_float8_training(block, config=Float8LinearConfig(emulate=emulates))
