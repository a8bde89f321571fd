"""The MLP of a layer: `down(act(gate(x)) * up(x))` if it is gated, else `down(act(up(x)))`.

Everything follows from its linear layers, `spec.parts.mlp_linears`: `models.mlp` builds them, and
here are their operations, with FLOPs and saved bytes, and the workspaces of forward and backward.
Under tp it is one region, whose messages are in `program.tp_collectives`.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.program.layers.linears import (
    Inputs,
    column_workspaces,
    row_kept,
    row_workspaces,
    shard_size,
)
from meshwright.program.layers.workspace import Workspace, mask_bytes
from meshwright.program.lower import Program
from meshwright.program.saved import Bytes, Op
from meshwright.program.sizes import Sizes
from meshwright.spec.parts import mlp_linears


def operations(program: Program, sizes: Sizes) -> Iterator[Op]:
    """Yield the operations of an MLP on a rank."""
    inputs = Inputs.of_stream(program, sizes)
    yield from gated_operations(program, sizes, "mlp", inputs, row_kept(program, sizes))


def gated_operations(
    program: Program, sizes: Sizes, name: str, inputs: Inputs, result_kept: Bytes
) -> Iterator[Op]:
    """Yield the operations of an MLP or shared expert, named `name`.

    `inputs` is the input of its first layers; selective recomputation saves `result_kept` of its
    result.
    """
    *columns, down = mlp_linears(program.model, name)
    hidden = sizes.tokens * shard_size(program, down.inner) * sizes.element
    for linear in columns:
        yield from inputs.operations(linear)
    # It keeps the results of these; act(gate) is made again.
    io_bytes = (len(columns) + 1) * hidden
    yield Op(f"{name}.act", "activation", saved=(hidden,) * len(columns), io_bytes=io_bytes)
    yield from Inputs(program, sizes, hidden).operations(down, result_kept)


def backward_workspaces(program: Program, sizes: Sizes) -> Iterator[Workspace]:
    """Yield the workspaces of an MLP's backward, the last operation first."""
    hidden = sizes.tokens * sizes.ffn * sizes.element
    *columns, down = mlp_linears(program.model)
    yield from row_workspaces(program, sizes, down)
    # The gradient of its result, and those of its factors.
    yield Workspace("mlp.act", (len(columns) + 1) * hidden)
    yield from column_workspaces(program, sizes, columns)


def forward_workspace(program: Program, sizes: Sizes) -> int:
    """Return the most temporary bytes of an MLP's forward.

    With recomputation, these include the result of the norm before it, which is not saved.
    """
    is_kept = program.layout.recompute == "none" or not program.model.norms_before
    normed = 0 if is_kept else sizes.whole_bytes
    return normed + max(_activation(program, sizes), _adapted_down(program, sizes))


def _activation(program: Program, sizes: Sizes) -> int:
    """Return the temporary bytes of the activation, or of the last matmul.

    Selective recomputation saves matmul results, but not their sums with those of adapters, which
    are the activation's input; full recomputation saves neither.
    """
    hidden, recompute = sizes.tokens * sizes.ffn * sizes.element, program.layout.recompute
    factors = len(mlp_linears(program.model)) - 1
    if recompute == "none" or (recompute == "selective" and program.model.lora is None):
        return max((factors - 1) * hidden, sizes.whole_bytes)
    return hidden + max(factors * hidden, sizes.whole_bytes)


def _adapted_down(program: Program, sizes: Sizes) -> int:
    """Return the temporary bytes of the last matmul if it has an adapter.

    There are three results: the layer's, the adapter's, and their sum. The adapter saves its input,
    or with dropout a copy.
    """
    model, keeps = program.model, program.layout.recompute == "none"
    if model.lora is None or "mlp.down" not in model.adapted:
        return 0
    hidden, sums = sizes.tokens * sizes.ffn * sizes.element, 3 * sizes.whole_bytes
    if not model.lora.dropout:
        return sums + (0 if keeps else hidden)
    masking = sizes.whole_bytes + mask_bytes(sizes.tokens * sizes.ffn)
    if keeps:  # the copy counts as kept, but comes after its mask
        return max(masking, sums + hidden)
    return hidden + max(masking, sums + hidden)
