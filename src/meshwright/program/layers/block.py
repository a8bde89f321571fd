"""A block: attention and an MLP or experts, each with its norms, in the order of the forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from types import ModuleType

from meshwright.program.layers import attention, delta, mamba, mixers, mlp, moe
from meshwright.program.layers.norms import with_norm_workspaces, with_norms
from meshwright.program.layers.workspace import Workspace, mask_bytes
from meshwright.program.lower import Program
from meshwright.program.messages import Collective
from meshwright.program.saved import Op
from meshwright.program.sizes import Sizes
from meshwright.program.stages import Stage
from meshwright.spec.model import LayerSpec


def operations(program: Program, sizes: Sizes, kind: LayerSpec, cp_rank: int) -> Iterator[Op]:
    """Yield the operations of a kind of layer on a rank, in the order of the forward."""
    if kind.mixes:
        attends = attention.operations(program, sizes, kind, cp_rank) if kind.attends else ()
        recurs = _recurrence(kind).operations(program, sizes) if kind.recurs else ()
        mixer = () if kind.mixer is None else mixers.operations(program, sizes, kind.mixer)
        yield from with_norms(program, sizes, "attn", chain(recurs, attends, mixer))
    if kind.feeds:
        feeding = moe if program.model.has_experts(kind) else mlp
        shares = program.model.parallel_residual
        ops = feeding.operations(program, sizes)
        yield from with_norms(program, sizes, "mlp", ops, shares_input=shares)


def _recurrence(kind: LayerSpec) -> ModuleType:
    """Return the table of a layer's recurrence."""
    return delta if kind.delta else mamba


def context_messages(
    program: Program, sizes: Sizes, stages: Iterable[Stage]
) -> Iterator[Collective]:
    """Yield the messages of context parallelism of the layers of some stages."""
    if program.layout.cp == 1:
        return
    kinds = Counter(program.model.layer(layer) for stage in stages for layer in stage.layers)
    attending = sum(count for kind, count in kinds.items() if kind.attends)
    yield from attention.context_messages(program, sizes, attending)
    for kind, count in kinds.items():
        if kind.recurs:
            yield from _recurrence(kind).passed(program).messages(program, sizes, count)


def backward_workspaces(program: Program, sizes: Sizes, kind: LayerSpec) -> Iterator[Workspace]:
    """Yield the workspaces of a layer's backward, besides saved tensors.

    These are gradients in flight, and results of an operation while its inputs still exist, without
    the gradient of the residual stream. The order is autograd's: the last operation of the forward
    comes first. Linear layers of one input that are computed together have two: while the input
    gradient is computed, and, under the name of the first one, while it is sent and weight
    gradients are computed.
    """
    if kind.feeds:
        feeding = moe if program.model.has_experts(kind) else mlp
        needs = feeding.backward_workspaces(program, sizes)
        yield from with_norm_workspaces(program, sizes, "mlp", needs)
    if kind.mixes:
        mixer = () if kind.mixer is None else mixers.backward_workspaces(program, sizes, kind.mixer)
        recurs = _recurrence(kind).backward_workspaces(program, sizes) if kind.recurs else ()
        attends = attention.backward_workspaces(program, sizes, kind) if kind.attends else ()
        needs = chain(mixer, recurs, attends)
        yield from with_norm_workspaces(program, sizes, "attn", needs)


def inside_kernels(program: Program) -> int:
    """Return the most bytes that a kernel of attention or of a recurrence allocates internally,
    over the kinds of layers."""
    sizes = Sizes.of(program)
    largest: int = max(
        _recurrence(kind).chunk_bytes(program, sizes)
        if kind.recurs
        else attention.kernel_bytes(program, sizes, kind)
        for kind in program.model.layer_kinds
    )
    return largest


def forward_workspace(program: Program, sizes: Sizes, kind: LayerSpec) -> int:
    """Return the most temporary bytes at the end of a layer's forward, besides saved tensors.

    The end is the peak because most is saved by then: it is in the MLP, or in the dropout of its
    result. The residual stream between attention and MLP counts if nothing saves it.
    """
    model, recompute = program.model, program.layout.recompute
    is_kept = recompute == "none" and not model.parallel_residual
    within = sizes.stream_bytes
    if kind.feeds:
        feeding = moe if model.has_experts(kind) else mlp
        within = feeding.forward_workspace(program, sizes)
    dropped = sizes.stream_bytes + mask_bytes(sizes.stream * sizes.dim) if model.dropout else 0
    return (0 if is_kept else sizes.stream_bytes) + max(within, dropped)
