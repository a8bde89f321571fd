"""Gated DeltaNet: its operations, with FLOPs and saved bytes, and the workspaces of its backward.

`models.delta_net` and `models.delta_rule` compute it. Under tp, a rank has some of the key heads,
and the value heads that share them, in one region with the same messages as attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from meshwright.program.layers.linears import (
    Inputs,
    column_workspaces,
    row_kept,
    row_workspaces,
)
from meshwright.program.layers.recurrence import WIDE, ChunkTensors, Widths, gated_norm_bytes
from meshwright.program.layers.workspace import Workspace
from meshwright.program.lower import Program
from meshwright.program.saved import Op
from meshwright.program.sizes import Sizes
from meshwright.spec.parts import DeltaWidths, delta_linears, delta_shape
from meshwright.spec.recurrences import chunk_flops

_OF_CHUNK: Final = ChunkTensors(values=12, keys=6, pairs=8, states=4)


def operations(program: Program, sizes: Sizes) -> Iterator[Op]:
    """Yield the operations of a layer's recurrence on a rank, in the order of its forward."""
    model, widths = program.model, DeltaWidths.of(program.model, program.layout.tp)
    line, heads = sizes.tokens * sizes.element, widths.ba // 2
    of_keys, of_values = line * widths.keys, line * widths.values
    inputs = Inputs.of_stream(program, sizes)
    *columns, last = delta_linears(model)
    for linear in columns:
        yield from inputs.operations(linear)
    of_heads = line * widths.ba
    yield Op("attn.gates", "activation", saved=of_heads, io_bytes=2 * of_heads)
    channels = of_keys, of_keys, of_values
    yield Op("attn.conv", "activation", saved=channels, io_bytes=2 * sum(channels))
    recurrence = _recurrence(program, widths)
    states = recurrence.state_bytes(program, sizes)
    yield Op(
        "attn.core",
        "attention",
        flops=sizes.tokens * chunk_flops(*delta_shape(model, program.layout.tp)),
        saved=(*channels, sizes.tokens * heads * WIDE, line * heads, states),
        kept=(of_values, states, recurrence.state_bytes(program, sizes, chunks=1)),
    )
    gated = of_values, of_values
    yield Op("attn.gated_norm", "norm", saved=gated, normed=2 * of_values)
    inside = Inputs(program, sizes, of_values)
    yield from inside.operations(last, row_kept(program, sizes))


def _recurrence(program: Program, widths: DeltaWidths) -> Widths:
    model = program.model
    state = model.delta_heads // program.layout.tp * model.delta_key_dim * model.delta_value_dim
    return Widths(widths.values, widths.keys, widths.ba // 2, state)


def backward_workspaces(program: Program, sizes: Sizes) -> Iterator[Workspace]:
    """Yield the workspaces of the operations' backward, the last operation first.

    The convolution processes one projection at a time, with four fp32 tensors besides all
    gradients.
    """
    widths = DeltaWidths.of(program.model, program.layout.tp)
    line, heads = sizes.tokens * sizes.element, widths.ba // 2
    of_keys, of_values = line * widths.keys, line * widths.values
    wide_values = sizes.tokens * widths.values * WIDE
    *columns, last = delta_linears(program.model)
    yield from row_workspaces(program, sizes, last)
    norm = gated_norm_bytes(sizes, of_values)
    yield Workspace("attn.gated_norm", norm, ("attn.gated_norm.weight",))
    of_gates = sizes.tokens * heads * (WIDE + sizes.element)
    made_bytes = 2 * of_keys + of_values + of_gates
    of_chunk = _recurrence(program, widths).chunk_bytes(program, sizes, _OF_CHUNK)
    core = of_values + made_bytes + of_chunk
    yield Workspace("attn.core", of_values + core)  # beside the gradient of the gate z
    convs = tuple(f"attn.{name}_conv" for name in "qkv")
    yield Workspace("attn.conv", of_values + made_bytes + 4 * wide_values, convs)
    parts = line * widths.qkvz
    yield Workspace("attn.heads", 2 * parts + of_gates)
    of_heads = line * widths.ba
    yield Workspace("attn.gates", parts + of_gates + 2 * of_heads, ("attn.a_log", "attn.dt_bias"))
    yield from column_workspaces(program, sizes, columns)
