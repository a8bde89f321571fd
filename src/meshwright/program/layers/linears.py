"""Linear layers of a sublayer, with their adapters: matmuls, saved bytes, and workspaces.

Under tp, layers of one input are column-parallel and enter the region together; the one whose
result is added to the residual stream is row-parallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from meshwright.layout.schedules import SCHEDULES
from meshwright.program.float8 import remakes_inputs
from meshwright.program.layers.workspace import Workspace, frozen, of_result, weights_of
from meshwright.program.lower import Program
from meshwright.program.saved import FROZEN_BACKWARD, Bytes, Op
from meshwright.program.shards import TENSOR_AXES
from meshwright.program.sizes import Sizes
from meshwright.spec.parts import Linear, Side

_WIDE: Final = 4


def is_joint(program: Program) -> bool:
    """Whether one autograd function computes all linear layers of one input,
    `parallel.tensor_parallel.deferred`.

    It does under tp, and where weight gradients may be deferred; not where weights are frozen.
    """
    layout = program.layout
    if program.model.lora is not None:
        return False
    return layout.tp > 1 or (layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward)


def gathers_again(program: Program) -> bool:
    """Whether the backward gathers the input of column-parallel layers again from a saved shard.

    arXiv:2205.05198, section 4.2.2. After a recomputed forward, the backward follows at once and
    uses its gathered input.
    """
    layout = program.layout
    return layout.tp > 1 and layout.sp and layout.recompute == "none" and is_joint(program)


def shard_size(program: Program, side: Side) -> int:
    """Return the size of a linear layer's input or output on one tp rank."""
    size, axis = side
    return size // program.layout.tp if axis in TENSOR_AXES else size


class Inputs:
    """The common input of some linear layers: `size` bytes, which the first layer that needs it
    saves.

    `copied` is the bytes of the copy that an adapter's dropout makes. A matmul with a frozen weight
    saves nothing, because it computes no weight gradient, nor does one whose input is recomputed.
    """

    def __init__(self, program: Program, sizes: Sizes, size: int, copied: int = 0) -> None:
        self._program, self._sizes = program, sizes
        self._size, self._copied = size, copied or size
        if remakes_inputs(program.train, program.target):
            self._size = 0

    @classmethod
    def of_stream(cls, program: Program, sizes: Sizes) -> Inputs:
        """Return the input of column-parallel layers, which save it whole, or their shard if it is
        gathered again."""
        size = sizes.stream_bytes if gathers_again(program) else sizes.whole_bytes
        return cls(program, sizes, size)

    def operations(self, linear: Linear, kept_bytes: Bytes | None = None) -> Iterator[Op]:
        """Yield the matmul of a layer, and those of its adapter.

        `kept_bytes` is what selective recomputation saves of the result (`Op.kept`); None for all
        of it.
        """
        sizes, model, name = self._sizes, self._program.model, linear.name
        inner, outer = (shard_size(self._program, side) for side in (linear.inner, linear.outer))
        flops, result = sizes.product(inner, outer), sizes.tokens * outer * sizes.element
        kept_bytes = result if kept_bytes is None else kept_bytes
        if model.lora is None:
            yield Op(name, "product", flops, self._take(), kept_bytes)
            return
        yield Op(name, "product", flops, 0, kept_bytes, backward=FROZEN_BACKWARD)
        if name not in model.adapted:
            return
        rank = model.lora.rank
        low = sizes.tokens * rank * sizes.element
        saved = self._copied if model.lora.dropout else self._take()
        yield Op(f"{name}.lora_a", "product", sizes.product(inner, rank), saved, low)
        yield Op(f"{name}.lora_b", "product", sizes.product(rank, outer), low, result)

    def _take(self) -> int:
        size, self._size = self._size, 0
        return size


def row_kept(program: Program, sizes: Sizes) -> tuple[int, ...]:
    """Return what selective recomputation saves of a row-parallel layer's result.

    These are the partial sums, and under tp also the reduced result.
    """
    return sizes.whole_bytes, sizes.stream_bytes if program.layout.tp > 1 else 0


def row_workspaces(
    program: Program, sizes: Sizes, linear: Linear, waits: int = 0
) -> Iterator[Workspace]:
    """Yield the workspaces of a row-parallel layer's backward.

    A deferred weight gradient holds the gradient of the layer's result, and `waits` further bytes.
    """
    gathered = sizes.whole_bytes if program.layout.sp and program.layout.tp > 1 else 0
    result_bytes = of_result(program, sizes) + gathered
    inner = shard_size(program, linear.inner)
    input_bytes = sizes.tokens * inner * sizes.element
    if program.model.lora is not None:
        yield from frozen(program, sizes, linear.name, result_bytes, 0, input_bytes)
        return
    rooms = weight_gradient_rooms(program, sizes, sizes.dim, inner, input_bytes)
    need, waits = result_bytes + input_bytes, waits + sizes.whole_bytes
    yield Workspace(linear.name, need, weights_of(linear), waits, *rooms)


def column_workspaces(
    program: Program, sizes: Sizes, linears: Sequence[Linear]
) -> Iterator[Workspace]:
    """Yield the workspaces of the backward of column-parallel layers of one input."""
    line = sizes.tokens * sizes.element  # a number of each token
    outers = [shard_size(program, linear.outer) for linear in linears]
    if program.model.lora is not None:
        results = {linear.name: line * outer for linear, outer in zip(linears, outers, strict=True)}
        yield from _frozen_columns(program, sizes, results)
        return
    whole_bytes, grads = sizes.whole_bytes, line * sum(outers)
    if not is_joint(program):
        held_bytes, made_bytes = grads, whole_bytes
        # One after the other: what the last one made is added to.
        for linear, outer in zip(reversed(linears), reversed(outers), strict=True):
            rooms = weight_gradient_rooms(program, sizes, outer, sizes.dim, whole_bytes)
            need = held_bytes + made_bytes
            yield Workspace(linear.name, need, weights_of(linear), line * outer, *rooms)
            held_bytes, made_bytes = held_bytes - line * outer, 2 * whole_bytes
        return
    first, regathers = linears[0].name, gathers_again(program)
    made_bytes, travelling = of_input(program, sizes, len(linears), gathers=regathers)
    yield Workspace(f"{first}: input", grads + made_bytes)
    weights = tuple(weight for linear in linears for weight in weights_of(linear))
    waits = whole_bytes - sizes.stream_bytes if regathers else 0
    rooms_of_all = [weight_gradient_rooms(program, sizes, outer, sizes.dim) for outer in outers]
    largest_rooms = map(max, zip(*rooms_of_all, strict=True))
    yield Workspace(first, grads + travelling, weights, grads + waits, *largest_rooms)


def _frozen_columns(
    program: Program, sizes: Sizes, results: Mapping[str, int]
) -> Iterator[Workspace]:
    """Yield the workspaces of column-parallel layers with frozen weights, and of their adapters.

    `results` has the bytes of each layer's output.
    """
    result_bytes, made_bytes = sum(results.values()), 0
    for name, size in reversed(list(results.items())):
        yield from frozen(
            program, sizes, name, result_bytes + made_bytes - size, size, sizes.whole_bytes
        )
        result_bytes, made_bytes = result_bytes - size, sizes.whole_bytes
    if program.layout.tp > 1:
        sent, _ = of_input(program, sizes, gathers=False)
        yield Workspace(f"{next(iter(results))}: input", sent)


def of_input(
    program: Program, sizes: Sizes, summands: int = 1, *, gathers: bool
) -> tuple[int, int]:
    """Return the bytes that the input gradient of linear layers needs while it is computed, and
    while it is sent.

    `summands` is the number of layers; with `gathers`, the input is gathered again for them. The
    sum over tp is in place. With sp, the gradient is reduce-scattered: splitting it copies if there
    are several sequences, and gloo reduces a copy.
    """
    whole_bytes = sizes.whole_bytes
    if not (program.layout.sp and program.layout.tp > 1):
        return min(summands, 2) * whole_bytes, whole_bytes
    gathered = whole_bytes if gathers else 0
    sent = whole_bytes + (whole_bytes if sizes.rows > 1 else 0)
    copied = whole_bytes if program.target.traits.reduces_copies else 0
    made_bytes = gathered + sent + sizes.stream_bytes + copied
    # Of what was sent, the copy that is cut is kept until it has arrived.
    return made_bytes, gathered + whole_bytes + sizes.stream_bytes


def weight_gradient_rooms(
    program: Program, sizes: Sizes, outer: int, inner: int, made_bytes: int = 0
) -> tuple[int, int]:
    """Return `Workspace.room` and `Workspace.added` of the matmul for a weight gradient `[outer,
    inner]`.

    Autograd computes it before the gradient of the input, whose `made_bytes` are already counted:
    only the excess is added. `is_joint` layers compute it after that gradient.
    """
    if sizes.element != _WIDE:
        return 0, 0
    products, shape = program.target.products, (outer, sizes.tokens, inner)
    room = products.room(*shape)
    return room if is_joint(program) else max(room - made_bytes, 0), products.room(
        *shape, adds=True
    )
