"""Which weights ZeRO gathers in float8: those of float8 matmuls, where FSDP2 gathers them.

Each has a scale, computed from its largest value: arXiv:2209.05433, section 3. Ranks find the
largest values of all their weights in one all-reduce, before the first forward of a step.
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
    """Whether ranks round weights to float8 before gathering them.

    FSDP2 lets a shard decide what is gathered, except for shards on the host, which are copied
    first. The exchange between CPU ranks, which emulate float8, sends bf16.
    """
    return train.fp8 and target.uses_fsdp2(layout) and layout.offload != "params"


def remakes_inputs(train: TrainSpec, target: Target) -> bool:
    """Whether the backward of a compiled block recomputes the inputs of float8 matmuls instead of
    saving them.

    The cast to float8 is fused with the norm or activation before it, so the compiler saves the
    inputs of these.
    """
    return train.fp8 and target.compiled


def is_in_float8(part: Part) -> bool:
    """Whether `train.fp8` computes this parameter's matmul in float8: those of linear layers in
    blocks."""
    return part.is_matmul and part.name.startswith("layers.")


def gathered_element(part: Part, element: int, rounded: bool) -> int:
    """Return the bytes per element of a gathered weight: 1 in float8 (if `rounded`), otherwise
    `element`."""
    return FLOAT8_BYTES if rounded and is_in_float8(part) else element


@lru_cache(maxsize=64)
def float8_weights(model: ModelSpec, kind: LayerSpec) -> int:
    """Return the number of weights in a kind of layer whose matmuls are in float8."""
    return sum(map(is_in_float8, parts(model.alike(kind, n_layers=1))))
