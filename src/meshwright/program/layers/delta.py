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
from meshwright.program.layers.recurrence import (
    WIDE,
    ChunkTensors,
    Passed,
    Widths,
    gated_norm_bytes,
)
from meshwright.program.layers.workspace import Workspace
from meshwright.program.lower import Program
from meshwright.program.saved import ATTENTION_BACKWARD, Op
from meshwright.program.sizes import Sizes
from meshwright.spec.parts import DeltaWidths, delta_linears, delta_shape
from meshwright.spec.recurrences import chunk_flops, delta_ends_flops, delta_step_flops

_OF_CHUNK: Final = ChunkTensors(values=8, keys=5, pairs=9, states=4)


def operations(program: Program, sizes: Sizes) -> Iterator[Op]:
    """Yield the operations of a layer's recurrence on a rank, in the order of its forward."""
    model, widths = program.model, DeltaWidths.of(program.model, program.layout.tp)
    line, heads = sizes.tokens * sizes.element, widths.heads
    of_keys, of_values = line * widths.keys, line * widths.values
    inputs = Inputs.of_stream(program, sizes)
    *columns, last = delta_linears(model)
    for linear in columns:
        yield from inputs.operations(linear)
    of_heads = 2 * line * heads
    yield Op("attn.gates", "activation", saved=of_heads, io_bytes=2 * of_heads)
    channels = of_keys, of_keys, of_values
    passing, recurrence = passed(program), _recurrence(program, widths)
    before = passing.before_bytes(program, sizes)
    yield Op("attn.conv", "activation", saved=(*channels, before), io_bytes=2 * sum(channels))
    yield from passing.operations(program, sizes)
    states = recurrence.state_bytes(program, sizes)
    transitions = passing.transition_bytes(program, sizes)
    yield Op(
        "attn.core",
        "attention",
        flops=sizes.tokens * chunk_flops(*delta_shape(model, program.layout.tp)),
        saved=(*channels, sizes.tokens * heads * WIDE, line * heads, states, transitions),
        kept=(of_values, states, recurrence.state_bytes(program, sizes, chunks=1)),
        backward=ATTENTION_BACKWARD,
    )
    gated = of_values, of_values
    yield Op("attn.gated_norm", "norm", saved=gated, normed=2 * of_values)
    inside = Inputs(program, sizes, of_values)
    yield from inside.operations(last, row_kept(program, sizes))


def passed(program: Program) -> Passed:
    """Return what passes between the pieces of a sequence."""
    shape = heads, _, key_dim, value_dim = delta_shape(program.model, program.layout.tp)
    widths = DeltaWidths.of(program.model, program.layout.tp)
    return Passed(
        state=heads * key_dim * value_dim,
        transition=heads * key_dim * key_dim,
        channels=2 * widths.keys + widths.values,
        taps=program.model.delta_kernel - 1,
        ends=delta_ends_flops(*shape),
        starts=chunk_flops(*shape),
        step=delta_step_flops(heads, key_dim, value_dim),
    )


def chunk_bytes(program: Program, sizes: Sizes) -> int:
    """Return the temporary bytes of a chunk's backward."""
    widths = DeltaWidths.of(program.model, program.layout.tp)
    return _recurrence(program, widths).chunk_bytes(program, sizes, _OF_CHUNK)


def _recurrence(program: Program, widths: DeltaWidths) -> Widths:
    model = program.model
    state = model.delta_heads // program.layout.tp * model.delta_key_dim * model.delta_value_dim
    return Widths(widths.values, widths.keys, widths.heads, state)


def backward_workspaces(program: Program, sizes: Sizes) -> Iterator[Workspace]:
    """Yield the workspaces of the operations' backward, the last operation first.

    The convolution processes one projection at a time, with four fp32 tensors besides all
    gradients.
    """
    widths = DeltaWidths.of(program.model, program.layout.tp)
    line, heads = sizes.tokens * sizes.element, widths.heads
    of_keys, of_values = line * widths.keys, line * widths.values
    wide_values = sizes.tokens * widths.values * WIDE
    *columns, last = delta_linears(program.model)
    yield from row_workspaces(program, sizes, last)
    norm = gated_norm_bytes(sizes, of_values)
    yield Workspace("attn.gated_norm", norm, ("attn.gated_norm.weight",))
    of_gates = sizes.tokens * heads * (WIDE + sizes.element)
    made_bytes = 2 * of_keys + of_values + of_gates
    inside = chunk_bytes(program, sizes)
    core = passed(program).workspace(program, sizes, made_bytes + inside)
    # Beside the gradients of the result and of the gate z.
    yield Workspace("attn.core", 2 * of_values + core)
    convs = tuple(f"attn.{name}_conv" for name in "qkv")
    yield Workspace("attn.conv", of_values + made_bytes + 4 * wide_values, convs)
    of_projections, of_heads = 2 * (of_keys + of_values), 2 * line * heads
    yield Workspace(
        "attn.gates", of_projections + of_gates + 2 * of_heads, ("attn.a_log", "attn.dt_bias")
    )
    yield from column_workspaces(program, sizes, columns)
