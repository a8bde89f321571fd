"""The memory of a matmul with an NF4 weight, which is dequantized for each use."""

from __future__ import annotations

import math

from meshwright.program.lower import Program
from meshwright.program.sizes import Sizes
from meshwright.spec.lora import NF4_PIECE

# Of each number that is dequantised at once: its byte's place in the table, of two numbers, as
# int32, and itself in fp32.
ROOM = 2 + 4
# What a number's dequantisation moves beside what it is stored as and made: the place written and
# read, the fp32 number written, scaled in place and read.
MOVED = 2 * 2 + 4 * 4


def dequantised(program: Program, sizes: Sizes, name: str) -> tuple[int, int]:
    """Return the bytes of a dequantized NF4 weight, and of the buffers while it is dequantized.

    `name` has `*` for the number of the layer. Both are 0 for a weight that is not in NF4.
    """
    sharding = program.shardings.get(name.replace("*", "0"))
    if sharding is None or not sharding.part.is_nf4:
        return 0, 0
    outer, inner = sharding.tp_shape
    at_once = min(max(NF4_PIECE // inner, 1), outer)
    return outer * inner * sizes.element, at_once * inner * ROOM


def dequantising_bytes(program: Program, sizes: Sizes) -> int:
    """Return the bytes read and written to dequantize a layer's NF4 weights once on a rank."""
    shardings = (
        sharding for name, sharding in program.shardings.items() if name.startswith("layers.0.")
    )
    return sum(
        sharding.stored_bytes(1) + math.prod(sharding.tp_shape) * (MOVED + sizes.element)
        for sharding in shardings
        if sharding.part.is_nf4
    )
