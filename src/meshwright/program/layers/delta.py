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
from meshwright.program.layers.workspace import Workspace
from meshwright.program.lower import Program
from meshwright.program.saved import Op
from meshwright.program.sizes import Sizes
from meshwright.spec.parts import DeltaWidths, delta_linears, delta_shape
from meshwright.spec.recurrences import CHUNK, chunk_flops

_WIDE: Final = 4
# Tensors of a chunk that the backward of the rule has at once, in fp32: of the size of values, of
# keys, of pairs of tokens, and of states.
_OF_VALUES: Final = 12
_OF_KEYS: Final = 6
_OF_PAIRS: Final = 8
_OF_STATES: Final = 4


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
    states = state_bytes(program, sizes)
    yield Op(
        "attn.core",
        "attention",
        flops=sizes.tokens * chunk_flops(*delta_shape(model, program.layout.tp)),
        saved=(*channels, sizes.tokens * heads * _WIDE, line * heads, states),
        kept=(of_values, states, state_bytes(program, sizes, chunks=1)),
    )
    gated = of_values, of_values
    yield Op("attn.gated_norm", "norm", saved=gated, normed=2 * of_values)
    inside = Inputs(program, sizes, of_values)
    yield from inside.operations(last, row_kept(program, sizes))


def state_bytes(program: Program, sizes: Sizes, chunks: int | None = None) -> int:
    """Return the bytes of the recurrent states before each chunk of the sequences, or for `chunks`
    chunks."""
    model = program.model
    count = -(-program.sequence // CHUNK) if chunks is None else chunks
    state = model.delta_heads // program.layout.tp * model.delta_key_dim * model.delta_value_dim
    return sizes.rows * count * state * _WIDE


def backward_workspaces(program: Program, sizes: Sizes) -> Iterator[Workspace]:
    """Yield the workspaces of the operations' backward, the last operation first.

    In fp32: the gated norm has the incoming gradient and four tensors, or in half precision one
    more; the convolution processes one projection at a time, with four tensors besides all
    gradients.
    """
    widths = DeltaWidths.of(program.model, program.layout.tp)
    line, heads = sizes.tokens * sizes.element, widths.ba // 2
    of_keys, of_values = line * widths.keys, line * widths.values
    wide_values = sizes.tokens * widths.values * _WIDE
    *columns, last = delta_linears(program.model)
    yield from row_workspaces(program, sizes, last)
    inside = 4 if sizes.element == _WIDE else 5
    norm = of_values + inside * wide_values
    yield Workspace("attn.gated_norm", norm, ("attn.gated_norm.weight",))
    of_gates = sizes.tokens * heads * (_WIDE + sizes.element)
    made_bytes = 2 * of_keys + of_values + of_gates
    core = of_values + made_bytes + _chunk_bytes(program, sizes)
    yield Workspace("attn.core", of_values + core)  # beside the gradient of the gate z
    convs = tuple(f"attn.{name}_conv" for name in "qkv")
    yield Workspace("attn.conv", of_values + made_bytes + 4 * wide_values, convs)
    parts = line * widths.qkvz
    yield Workspace("attn.heads", 2 * parts + of_gates)
    of_heads = line * widths.ba
    yield Workspace("attn.gates", parts + of_gates + 2 * of_heads, ("attn.a_log", "attn.dt_bias"))
    yield from column_workspaces(program, sizes, columns)


def _chunk_bytes(program: Program, sizes: Sizes) -> int:
    """Return the workspace of a chunk's backward, in bytes."""
    widths = DeltaWidths.of(program.model, program.layout.tp)
    length = min(CHUNK, program.sequence)
    numbers = _OF_VALUES * widths.values + _OF_KEYS * widths.keys
    numbers += _OF_PAIRS * length * (widths.ba // 2)
    of_tokens = sizes.rows * length * numbers * _WIDE
    return of_tokens + _OF_STATES * state_bytes(program, sizes, chunks=1)
