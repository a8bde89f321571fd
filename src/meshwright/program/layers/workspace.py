"""`Workspace`: the memory of an operation's backward, also of matmuls with frozen weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from meshwright.program.lower import Program
from meshwright.program.nf4_workspace import dequantised
from meshwright.program.sizes import Sizes
from meshwright.spec.lora import matrices
from meshwright.spec.parts import Linear

_HASH: Final = 4  # bytes of a hash, from which dropout takes a bit of its mask


class Workspace(NamedTuple):
    """The workspace of an operation's backward in bytes, and the parameters whose gradients it
    computes.

    `deferred` is the gradient of a matmul's result, which a deferred weight gradient holds in
    addition to the input. `room` is temporary memory while a weight gradient is computed at once,
    `added` while a deferred one is added to a sum. `waiting` is the part of `bytes` that is already
    counted as deferred, where weight gradients are.
    """

    op: str
    bytes: int
    weights: tuple[str, ...] = ()
    deferred: int = 0
    room: int = 0
    added: int = 0
    waiting: int = 0


def frozen(
    program: Program, sizes: Sizes, name: str, held_bytes: int, result: int, inputs: int
) -> Iterator[Workspace]:
    """Yield the workspaces of the backward of a matmul with a frozen weight, and of its adapter.

    `result` and `inputs` are the bytes of their gradients; `held_bytes` are allocated besides; if
    these include the result's gradient, `result` is 0.
    """
    lora = program.model.lora
    # In four bits the weight is there as products take it, at first beside what makes it.
    weight, room = dequantised(program, sizes, f"layers.*.{name}.weight")
    made_bytes = weight + max(room, inputs)
    if lora is None or name not in program.model.adapted:
        yield Workspace(name, held_bytes + result + made_bytes)
        return
    low = sizes.tokens * lora.rank * sizes.element
    scaled = result or sizes.whole_bytes
    yield Workspace(f"{name}.lora_b", held_bytes + result + scaled + low, (f"{name}.lora_b",))
    yield Workspace(f"{name}.lora_a", held_bytes + result + low + inputs, (f"{name}.lora_a",))
    if lora.dropout:
        masks = mask_bytes(inputs // sizes.element)
        yield Workspace(f"{name}: dropout", held_bytes + result + inputs + masks)
    yield Workspace(name, held_bytes + result + inputs + made_bytes)


def separate(
    program: Program, sizes: Sizes, linear: Linear, held_bytes: int, result: int, inputs: int
) -> Iterator[Workspace]:
    """Yield the workspaces of the backward of a single linear layer, frozen or not; arguments as in
    `frozen`."""
    if program.model.lora is not None:
        yield from frozen(program, sizes, linear.name, held_bytes, result, inputs)
    else:
        made_bytes, waits = held_bytes + result + inputs, result or sizes.whole_bytes
        yield Workspace(linear.name, made_bytes, weights_of(linear), waits)


def mask_bytes(elements: int) -> int:
    """Return the temporary bytes of a dropout mask: 32-bit hashes, and the same shifted."""
    return 2 * _HASH * elements


def of_result(program: Program, sizes: Sizes) -> int:
    """Return the bytes of the gradient of a sublayer's result; 0 if it is the residual stream's
    own."""
    model = program.model
    return sizes.stream_bytes if model.dropout or model.norms_after else 0


def weights_of(linear: Linear) -> tuple[str, ...]:
    """Return the names of a layer's weight and, if it has one, its bias."""
    weight = f"{linear.name}.weight"
    return (weight, f"{linear.name}.bias") if linear.has_bias else (weight,)


def trained(program: Program, name: str, has_bias: bool = False) -> tuple[str, ...]:
    """Return the names of the parameters of an expert matrix that get gradients; with LoRA, the
    adapter's."""
    if program.model.lora is None:
        return (f"{name}.weight", f"{name}.bias") if has_bias else (f"{name}.weight",)
    return tuple(f"{name}.{matrix}" for matrix in matrices(program.model.adapted, name))
