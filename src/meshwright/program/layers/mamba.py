"""Mamba-2: its operations, with FLOPs and saved bytes, workspaces of its backward, and messages.

`models.mamba` and `models.state_space` compute it. Under tp a rank has some of the heads, and the
keys and queries of all groups, in one region whose messages are attention's. Where ranks share a
group, the norm of it sums squares over them.
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
from meshwright.program.messages import Collective, Phase
from meshwright.program.saved import ATTENTION_BACKWARD, Op
from meshwright.program.sizes import Sizes
from meshwright.spec.parts import mamba_linears, mamba_shape
from meshwright.spec.recurrences import state_space_ends_flops, state_space_flops

_OF_CHUNK: Final = ChunkTensors(values=6, keys=5, pairs=5, states=3)


def operations(program: Program, sizes: Sizes) -> Iterator[Op]:
    """Yield what a rank computes in a Mamba-2 layer, in order: FLOPs, bytes saved and moved.

    From the input projections to the output projection, with the states that cp ranks pass; the
    norm before the layer is not part of it.
    """
    shape = heads, groups, *_ = mamba_shape(program.model, program.layout.tp)
    of_values, of_groups = _channels(program, sizes)
    inputs = Inputs.of_stream(program, sizes)
    *columns, last = mamba_linears(program.model)
    for linear in columns:
        yield from inputs.operations(linear)
    of_steps = sizes.tokens * heads * WIDE
    of_heads = sizes.tokens * heads * sizes.element
    yield Op("attn.steps", "activation", saved=of_heads, io_bytes=of_heads + 2 * of_steps)
    channels = of_values, of_groups
    passing, widths = passed(program), _widths(program)
    before = passing.before_bytes(program, sizes)
    yield Op("attn.conv", "activation", saved=(*channels, before), io_bytes=2 * sum(channels))
    yield from passing.operations(program, sizes)
    states = widths.state_bytes(program, sizes)
    transitions = passing.transition_bytes(program, sizes)
    yield Op(
        "attn.core",
        "attention",
        flops=sizes.tokens * state_space_flops(*shape),
        saved=(*channels, of_steps, of_steps, states, transitions),
        kept=(of_values, states, widths.state_bytes(program, sizes, chunks=1)),
        backward=ATTENTION_BACKWARD,
    )
    scales = sizes.tokens * groups * WIDE
    yield Op(
        "attn.gated_norm",
        "norm",
        saved=(of_values, of_values, scales),
        kept=_sums_bytes(program, sizes) if shares_groups(program) else 0,
        normed=2 * of_values,
    )
    inside = Inputs(program, sizes, of_values)
    yield from inside.operations(last, row_kept(program, sizes))


def passed(program: Program) -> Passed:
    """Return what passes between the pieces of a sequence; a transition is a number of a head."""
    shape = heads, groups, state, head_dim = mamba_shape(program.model, program.layout.tp)
    flops = state_space_ends_flops(*shape)
    return Passed(
        state=heads * state * head_dim,
        transition=heads,
        channels=heads * head_dim + 2 * groups * state,
        taps=program.model.mamba_kernel - 1,
        ends=flops,
        starts=flops,
        step=0.0,
    )


def _channels(program: Program, sizes: Sizes) -> tuple[int, int]:
    """Return the bytes of values, and of the keys and queries of a rank's groups."""
    heads, groups, state, head_dim = mamba_shape(program.model, program.layout.tp)
    line = sizes.tokens * sizes.element
    return line * heads * head_dim, line * 2 * groups * state


def _widths(program: Program) -> Widths:
    heads, groups, state, head_dim = mamba_shape(program.model, program.layout.tp)
    return Widths(heads * head_dim, groups * state, heads, heads * state * head_dim)


def chunk_bytes(program: Program, sizes: Sizes) -> int:
    """Return the temporary bytes of a chunk's backward."""
    return _widths(program).chunk_bytes(program, sizes, _OF_CHUNK)


def shares_groups(program: Program) -> bool:
    """Whether several ranks of tp have heads of one group."""
    return program.model.mamba_groups % program.layout.tp != 0


def _sums_bytes(program: Program, sizes: Sizes) -> int:
    """Return the bytes of a number of each token and group."""
    return sizes.tokens * program.model.mamba_groups * WIDE


def norm_messages(program: Program, sizes: Sizes, passes: int) -> Iterator[Collective]:
    """Yield the sums over each group's features, where ranks of tp share groups."""
    if not passes or not shares_groups(program):
        return
    size, often = _sums_bytes(program, sizes), passes * (program.layout.recompute == "full")
    counts: tuple[tuple[Phase, int, str], ...] = (
        ("forward", passes, "sum the squares of groups"),
        ("recompute", often, "sum the squares of groups"),
        ("backward", passes, "sum what the scales of groups get"),
    )
    for phase, count, label in counts:
        reason = f"{phase}: {label}"
        yield Collective("all_reduce", "tp", size, count, phase, "layer", reason)


def backward_workspaces(program: Program, sizes: Sizes) -> Iterator[Workspace]:
    """Yield the workspaces of the operations' backward, the last operation first.

    A convolution has four fp32 tensors besides all gradients.
    """
    heads = mamba_shape(program.model, program.layout.tp)[0]
    of_values, of_groups = _channels(program, sizes)
    wide = WIDE // sizes.element
    *columns, last = mamba_linears(program.model)
    yield from row_workspaces(program, sizes, last)
    norm = gated_norm_bytes(sizes, of_values)
    yield Workspace("attn.gated_norm", norm, ("attn.gated_norm.weight",))
    of_steps = 2 * sizes.tokens * heads * WIDE
    made_bytes = of_values + of_groups + of_steps
    core = made_bytes + chunk_bytes(program, sizes)
    core = passed(program).workspace(program, sizes, core)
    # Beside the gradients of the result and of the gate z.
    yield Workspace("attn.core", 2 * of_values + core, ("attn.skip",))
    convs = tuple(
        f"attn.{channels}_conv.{name}" for channels in ("x", "bc") for name in ("weight", "bias")
    )
    largest = max(of_values, of_groups)
    yield Workspace("attn.conv", of_values + made_bytes + 4 * wide * largest, convs)
    of_gates = of_values + of_values + of_groups + 3 * of_steps
    yield Workspace("attn.steps", of_gates, ("attn.a_log", "attn.dt_bias"))
    yield from column_workspaces(program, sizes, columns)
