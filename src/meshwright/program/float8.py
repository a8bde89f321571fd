"""Which weights ZeRO gathers in float8: those that products take in it, where FSDP2 gathers them.

Each has a scale, which its largest value decides: arXiv:2209.05433, section 3. Ranks find those of
all their weights in one message, before the first forward of a step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from meshwright.layout import Layout
from meshwright.program.target import Target
from meshwright.spec.model import LayerSpec, ModelSpec
from meshwright.spec.parts import Part, parts
from meshwright.spec.training import TrainSpec

FLOAT8_BYTES: Final = 1
LARGEST_BYTES: Final = 4  # of a weight's largest value, in fp32


def gathers_float8(train: TrainSpec, layout: Layout, target: Target) -> bool:
    """Whether ranks round weights to float8 before they gather them.

    FSDP2 asks a shard what to gather of it, but one on the host is copied first. Our own exchange
    on CPUs, where float8 is rounded bf16, sends rows in bf16.
    """
    return train.fp8 and target.uses_fsdp2(layout) and layout.offload != "params"


def remakes_inputs(train: TrainSpec, target: Target) -> bool:
    """Whether the backward of a compiled block makes the inputs of its products again.

    It takes them in float8. What rounds them is joined with what made them, norms and activations,
    so that the compiler keeps what these have taken instead.
    """
    return train.fp8 and target.compiled


def is_in_float8(part: Part) -> bool:
    """Whether `train.fp8` computes with it in float8, as with the blocks' linear layers."""
    return part.is_matmul and part.name.startswith("layers.")


def gathered_element(part: Part, element: int, rounded: bool) -> int:
    """Return the bytes of a weight's element in a gather, `element` of them outside of float8."""
    return FLOAT8_BYTES if rounded and is_in_float8(part) else element


@lru_cache(maxsize=64)
def float8_weights(model: ModelSpec, kind: LayerSpec) -> int:
    """Return how many weights of a layer are in float8, each with a scale."""
    return sum(map(is_in_float8, parts(model.alike(kind, n_layers=1))))
