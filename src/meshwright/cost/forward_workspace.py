"""The temporary memory of a layer's forward, in bytes: what it holds besides what it keeps."""

from __future__ import annotations

from typing import Final

from meshwright.program.layers import mlp
from meshwright.program.layers.workspace import mask_bytes
from meshwright.program.lower import Program
from meshwright.program.sizes import Sizes
from meshwright.spec.model import LayerSpec

_WIDE: Final = 4


def forward_workspace(program: Program, sizes: Sizes, kind: LayerSpec) -> int:
    """Return the most temporary memory at the end of a layer's forward.

    That is where most is kept: in the feed-forward, and in the dropout of its result. The residual
    stream between attention and feed-forward counts where nothing keeps it.
    """
    model, recompute = program.model, program.layout.recompute
    is_kept = recompute == "none" and not model.parallel_residual
    stream = 0 if is_kept else sizes.stream_bytes
    if not kind.feeds:
        within = sizes.stream_bytes
    elif model.has_experts(kind):
        within = _experts(program, sizes)
    else:
        within = mlp.forward_workspace(program, sizes)
    dropped = sizes.stream_bytes + mask_bytes(sizes.stream * sizes.dim) if model.dropout else 0
    return stream + max(within, dropped)


def _experts(program: Program, sizes: Sizes) -> int:
    """Return the bytes of the experts' forward.

    At its end, they are the hidden values, and the pairs in the order of their tokens and their
    sums. Where each group has a product of its own, its results are there once more, concatenated;
    selective recomputation keeps those of all products. With full recomputation, the activation
    holds what it takes and what it makes.
    """
    pairs = sizes.received * sizes.dim * sizes.element
    hidden = sizes.received * sizes.expert_ffn * sizes.element
    recompute = program.layout.recompute
    remade = pairs
    if recompute == "selective":
        remade += 2 * hidden
    if program.target.traits.has_grouped_matmul and sizes.element != _WIDE:
        remade = 0
    end = remade + hidden + pairs + sizes.routed_bytes
    if recompute != "full":
        return end
    clamped = 0 if program.model.swiglu_limit is None else hidden
    return max(end, 4 * hidden + clamped + sizes.routed_bytes)
