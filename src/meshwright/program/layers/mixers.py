"""The operations, with bytes and FLOPs, of layers that can only be planned, from shapes:
`spec.mixers`.

Matrices that take the residual stream come first, then scores and recurrences, then matrices that
project back. A recurrence is priced at the rate of the attention kernel, and its bytes at memory
bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from meshwright.program.attention import causal_scores
from meshwright.program.layers.linears import Inputs, row_kept, shard_size
from meshwright.program.layers.workspace import Workspace
from meshwright.program.lower import Program
from meshwright.program.saved import ATTENTION_BACKWARD, Op
from meshwright.program.sizes import Sizes
from meshwright.spec.mixers import Matrix, Mixer
from meshwright.spec.parts import mixer_linear

VECTORS: Final = "mixer.vectors"
_CORE: Final = "mixer.core"
# Each saved element is written and read once in the forward.
_TWICE: Final = 2


def operations(program: Program, sizes: Sizes, mixer: Mixer) -> Iterator[Op]:
    """Yield the operations of a mixer on a rank, in the order of its forward."""
    stream = Inputs.of_stream(program, sizes)
    if mixer.attends:  # attention keeps what both take
        stream = Inputs(program, sizes, 0)
    for matrix in mixer.matrices:
        if matrix.lookup:
            row_bytes = sizes.tokens * matrix.inner * sizes.element
            yield Op(matrix.name, "activation", io_bytes=2 * row_bytes)
        elif matrix.cut != "inner":
            yield from _product(program, sizes, matrix, stream)
    yield from _core(program, sizes, mixer)
    for matrix in mixer.matrices:
        if matrix.cut == "inner":
            yield from _product(program, sizes, matrix, stream)


def _product(program: Program, sizes: Sizes, matrix: Matrix, stream: Inputs) -> Iterator[Op]:
    linear, inputs = mixer_linear(matrix), stream
    if matrix.cut == "inner" or matrix.inner != program.model.dim:
        size = sizes.tokens * shard_size(program, linear.inner) * sizes.element
        inputs = Inputs(program, sizes, size)
    kept_bytes = row_kept(program, sizes) if matrix.cut == "inner" else None
    yield from inputs.operations(linear, kept_bytes)


def _core(program: Program, sizes: Sizes, mixer: Mixer) -> Iterator[Op]:
    """Yield one operation for scores and recurrences, and one for the bytes that they move."""
    tp, flops = program.layout.tp, sizes.tokens * mixer.flops / program.layout.tp
    for scores in mixer.scores:
        seen = sizes.rows * causal_scores(program.train.seq_len, scores.window)
        flops += 2.0 * scores.heads / tp * scores.width * seen
    saved = sizes.tokens * mixer.saved // tp * sizes.element
    if flops:
        yield Op(_CORE, "attention", flops, saved, saved, backward=ATTENTION_BACKWARD)
    if saved:
        yield Op("mixer.moves", "activation", io_bytes=_TWICE * saved)


def backward_workspaces(program: Program, sizes: Sizes, mixer: Mixer) -> Iterator[Workspace]:
    """Yield the workspaces of a mixer's backward, the last operation first."""
    rows = [matrix for matrix in mixer.matrices if matrix.cut == "inner"]
    columns = [matrix for matrix in mixer.matrices if matrix.cut != "inner"]
    for matrix in reversed(rows):
        yield _workspace(program, sizes, matrix)
    saved = sizes.tokens * mixer.saved // program.layout.tp * sizes.element
    yield Workspace(_CORE, saved, (VECTORS,) if mixer.vectors else ())
    for matrix in reversed(columns):
        yield _workspace(program, sizes, matrix)


def _workspace(program: Program, sizes: Sizes, matrix: Matrix) -> Workspace:
    line, linear = sizes.tokens * sizes.element, mixer_linear(matrix)
    if matrix.lookup:
        return Workspace(matrix.name, line * matrix.inner, (matrix.weight,))
    inner, outer = (line * shard_size(program, side) for side in (linear.inner, linear.outer))
    return Workspace(matrix.name, inner + outer, (matrix.weight,), outer)
