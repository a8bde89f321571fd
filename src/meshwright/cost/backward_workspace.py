"""What a layer's operations need in their backward besides saved tensors, in bytes.

These are gradients in flight, and results of an operation while its inputs still exist. The order
is autograd's: the last operation of the forward comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from meshwright.cost.expert_workspace import expert_workspaces
from meshwright.cost.forward_workspace import forward_workspace
from meshwright.program.layers import attention, mixers, mlp
from meshwright.program.layers.norms import with_norm_workspaces
from meshwright.program.layers.workspace import Workspace
from meshwright.program.lower import Program
from meshwright.program.operations import Operation, operations
from meshwright.program.sizes import Sizes
from meshwright.program.stages import Stage
from meshwright.spec.model import LayerSpec

Size = tuple[str, int]
"""A category of what is held, and bytes of it."""


class LayerBytes(NamedTuple):
    """What a layer of one kind saves of a microbatch, and releases during its backward.

    `kept` exists after the forward, `anew` at the start of the backward. `backward` has the
    released sizes for each need; `left` is what none of them releases. `room` is the forward's
    temporary memory.
    """

    kept: tuple[Size, ...]
    anew: tuple[Size, ...]
    backward: tuple[tuple[Workspace, tuple[Size, ...]], ...]
    left: tuple[Size, ...]
    room: int


def layer_bytes(
    program: Program, sizes: Sizes, stage: Stage, kind: LayerSpec, cp_rank: int
) -> LayerBytes:
    """Return the bytes of a layer of one kind in the stage."""
    first, anew = (
        [
            op
            for op in operations(program, stage, cp_rank=cp_rank, recomputed=recomputed)
            if op.layer == kind
        ]
        for recomputed in (False, True)
    )
    backward, alive = [], anew
    for need in backward_workspaces(program, sizes, kind):
        matching = [op for op in alive if op.name.removeprefix("layers.*.") == need.op]
        backward.append((need, kept(matching)))
        alive = [op for op in alive if op not in matching]
    room = forward_workspace(program, sizes, kind)
    return LayerBytes(kept(first), kept(anew), tuple(backward), kept(alive), room)


def kept(ops: Iterable[Operation]) -> tuple[Size, ...]:
    """Return what operations save, by category."""
    sums: dict[str, int] = {}
    for op in ops:
        category = f"activations: {op.kind}"
        sums[category] = sums.get(category, 0) + op.saved_bytes
    return tuple((category, size) for category, size in sums.items() if size)


def backward_workspaces(program: Program, sizes: Sizes, kind: LayerSpec) -> tuple[Workspace, ...]:
    """Return the needs of the operations of a kind of layer, in backward order.

    Excludes the gradient of the residual stream. Products of one input that are computed together
    have two needs, the second under the name of the first product: while they compute the input
    gradient, and while it is sent and they compute weight gradients.
    """
    return (*_feed_forward(program, sizes, kind), *_mixing(program, sizes, kind))


def _feed_forward(program: Program, sizes: Sizes, kind: LayerSpec) -> Iterator[Workspace]:
    if not kind.feeds:
        return
    has_experts = program.model.has_experts(kind)
    feed_forward = expert_workspaces if has_experts else mlp.backward_workspaces
    yield from with_norm_workspaces(program, sizes, "mlp", feed_forward(program, sizes))


def _mixing(program: Program, sizes: Sizes, kind: LayerSpec) -> Iterator[Workspace]:
    if not kind.mixes:
        return
    mixer = () if kind.mixer is None else mixers.backward_workspaces(program, sizes, kind.mixer)
    attends = attention.backward_workspaces(program, sizes, kind) if kind.attends else ()
    yield from with_norm_workspaces(program, sizes, "attn", chain(mixer, attends))


def inside_kernels(program: Program) -> int:
    """Return the most bytes that a kernel of attention allocates, and its caller does not see."""
    sizes, kinds = Sizes.of(program), program.model.layer_kinds
    return max(attention.kernel_bytes(program, sizes, kind) for kind in kinds)
