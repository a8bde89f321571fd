"""What a product with a weight in four bits needs: the weight as products take it, each time."""

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
    """Return the bytes of a weight made of four bits, and of what is beside it meanwhile.

    `name` has `*` for the number of the layer. A weight that is not in four bits needs nothing.
    """
    sharding = program.shardings.get(name.replace("*", "0"))
    if sharding is None or not sharding.part.is_nf4:
        return 0, 0
    outer, inner = sharding.tp_shape
    at_once = min(max(NF4_PIECE // inner, 1), outer)
    return outer * inner * sizes.element, at_once * inner * ROOM


def dequantising_bytes(program: Program, sizes: Sizes) -> int:
    """Return the bytes that dequantising a layer's weights once moves on a rank."""
    shardings = (
        sharding for name, sharding in program.shardings.items() if name.startswith("layers.0.")
    )
    return sum(
        sharding.stored_bytes(1) + math.prod(sharding.tp_shape) * (MOVED + sizes.element)
        for sharding in shardings
        if sharding.part.is_nf4
    )
