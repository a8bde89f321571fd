"""The operations of one rank: what each computes, and the bytes that it saves for the backward.

All sizes are those of one microbatch on one rank, after sharding by tp, sp and cp. Saved tensors
follow the modules of `models` and `parallel` on a CPU, run eagerly; on CUDA, the same tensors are
saved, except for a mask. A test compares the bytes with what autograd really saves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from meshwright.program.layers import block
from meshwright.program.layers.norms import norm
from meshwright.program.lower import Program
from meshwright.program.saved import (
    FROZEN_BACKWARD,
    PRODUCT_BACKWARD,
    Bytes,
    Kind,
    Op,
    moved_of,
    total,
)
from meshwright.program.sizes import Sizes
from meshwright.program.stages import Stage
from meshwright.spec.model import LayerSpec

_WIDE: Final = 4  # bytes of fp32
_INT64: Final = 8


@dataclass(frozen=True)
class Operation:
    """One operation of a stage, for one microbatch on one rank.

    `name` is that of its module, with `*` for the number of the layer, and `count` the number of
    equal operations in the stage, in layers of the kind `layer` (None: outside of layers). `flops`
    are those of the forward, only for matmuls and attention: other operations are memory-bound.
    `saved_bytes` is what it saves for the backward; a shared tensor counts at its first operation.
    `moved_bytes` of them go to host memory if activations are offloaded. `normed_bytes` is the size
    of a norm's input. `backward` is the number of matmuls of this size in the backward: one for a
    frozen weight. `io_bytes` are what a memory-bound forward other than a norm reads and writes.
    """

    name: str
    kind: Kind
    stage: int
    flops: float
    saved_bytes: int
    count: int
    normed_bytes: int = 0
    layer: LayerSpec | None = None
    backward: float = PRODUCT_BACKWARD
    moved_bytes: int = 0
    io_bytes: int = 0


def operations(
    program: Program,
    stage: Stage,
    *,
    cp_rank: int = 0,
    recomputed: bool = False,
) -> tuple[Operation, ...]:
    """Return the operations of a stage, in order, for one microbatch on one rank.

    All tp ranks have the same. `cp_rank` matters under ring attention: with a window, ranks compute
    different numbers of pairs, and selective recomputation saves every step's result. With
    `recomputed`, saved bytes are those after a block's forward was recomputed for its backward.
    """
    sizes = Sizes.of(program)
    index = stage.index
    kinds = Counter(program.model.layer(layer) for layer in stage.layers)
    ops = []
    if stage.is_first:
        # Under tp the local ids, if it is trained, and where they are another rank's; else the
        # batch's own ids.
        saved = sizes.tokens * (_INT64 + 1) if program.layout.tp > 1 else 0
        saved = 0 if program.model.lora is not None else saved
        ops.append(
            Operation("embed", "embedding", index, 0.0, saved, 1, io_bytes=2 * sizes.stream_bytes)
        )
    ops += (
        Operation(
            f"layers.*.{op.name}",
            *(op.kind, index, op.flops, saved, count, op.normed, kind, op.backward, moved),
            io_bytes=op.io_bytes,
        )
        for kind, count in kinds.items()
        for op, saved, moved in _layer(program, sizes, kind, cp_rank, recomputed)
    )
    if stage.is_last:
        ops += (
            Operation(
                op.name,
                *(op.kind, index, op.flops, total(op.saved), 1, op.normed, None, op.backward),
            )
            for op in _end(program, sizes)
        )
    return tuple(ops)


def _layer(
    program: Program, sizes: Sizes, kind: LayerSpec, cp_rank: int, recomputed: bool
) -> Iterator[tuple[Op, int, int]]:
    """Yield the operations of a layer, each with its saved bytes and those of them that offload
    moves."""
    recompute = "none" if recomputed else program.layout.recompute
    # The layer's dropout keys, in the context that a second forward starts from, too.
    keys = sizes.rows * _INT64 if program.model.drops else 0
    if recompute != "none":
        yield Op("input", "block"), sizes.stream_bytes, sizes.stream_bytes
    for op in block.operations(program, sizes, kind, cp_rank):
        saved: Bytes = {"none": op.saved, "selective": op.kept, "full": 0}[recompute]
        indices = op.indices if recompute == "none" else 0
        moved = moved_of(saved, sizes.least_moved)
        yield op, total(saved) + indices, moved
    if keys:
        yield Op("dropout", "dropout", io_bytes=2 * sizes.stream_bytes), keys, 0


def _end(program: Program, sizes: Sizes) -> Iterator[Op]:
    """Yield the operations after the layers: last norm, head and loss."""
    yield norm(program, sizes, "norm")
    backward = PRODUCT_BACKWARD if program.model.lora is None else FROZEN_BACKWARD
    flops = sizes.product(sizes.dim, sizes.vocab)
    yield Op("head", "product", flops, sizes.stream_bytes, backward=backward)
    yield Op("loss", "loss", saved=_WIDE)  # where its sum will be
