"""Attention of a layer: its operations, saved bytes and workspaces, and the messages of cp ranks.

Queries, keys and values come from linear layers of one input, or as in `mla`:
`spec.parts.attention_linears`. Under tp it is one region, whose messages are in
`program.tp_collectives`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from meshwright.program.attention import Cut, ScoreBounds, by_blocks
from meshwright.program.layers import mla
from meshwright.program.layers.linears import (
    Inputs,
    column_workspaces,
    row_kept,
    row_workspaces,
    shard_size,
)
from meshwright.program.layers.norms import rms_norm_bytes
from meshwright.program.layers.workspace import Workspace
from meshwright.program.lower import Program
from meshwright.program.messages import Collective, CollectiveKind, Phase
from meshwright.program.saved import ATTENTION_BACKWARD, Op, by_steps
from meshwright.program.scores import is_plain, is_ring, pairs, ring_steps, spreads
from meshwright.program.sizes import Sizes
from meshwright.spec.model import LayerSpec
from meshwright.spec.parts import attention_linears

_WIDE: Final = 4  # bytes of statistics, the softmax and the rotary tables: fp32 in any precision
_INT64: Final = 8
_WAYS: Final[tuple[tuple[CollectiveKind, str], ...]] = (
    ("send", "to the next rank"),
    ("recv", "from the rank before"),
)


def operations(program: Program, sizes: Sizes, kind: LayerSpec, cp_rank: int) -> Iterator[Op]:
    """Yield the operations of attention on a rank, in the order of the forward."""
    if program.model.is_latent:
        yield from mla.operations(program, sizes)
    else:
        inputs = Inputs.of_stream(program, sizes)
        *columns, _ = attention_linears(program.model)
        for linear in columns:
            yield from inputs.operations(linear)
        yield from _head_norms(program, sizes)
    yield from _core(program, sizes, kind, cp_rank)


def _head_norms(program: Program, sizes: Sizes) -> Iterator[Op]:
    """Yield the RMSNorms of queries and keys; they save their inputs, and scales in fp32."""
    if program.model.qk_norm == "none":
        return
    per_head, of_q, of_k, sent = program.model.qk_norm == "head", 1, 1, 0
    if per_head:
        of_q, of_k = sizes.heads, sizes.kv_heads
    elif program.layout.tp > 1:
        # The sums of both over tp, in one message, which the selective policy keeps.
        of_q, of_k, sent = 2, 0, 2 * sizes.tokens * _WIDE
    norms = ("attn.q_norm", sizes.heads, of_q, sent), ("attn.k_norm", sizes.kv_heads, of_k, 0)
    for name, heads, statistics, kept_bytes in norms:
        size = sizes.tokens * heads * sizes.head_dim * sizes.element
        saved = size, sizes.tokens * statistics * _WIDE
        yield Op(name, "norm", saved=saved, kept=kept_bytes, normed=size)


def _core(program: Program, sizes: Sizes, kind: LayerSpec, cp_rank: int) -> Iterator[Op]:
    """Yield the rotary embedding, attention itself, and the output projection."""
    model, layout = program.model, program.layout
    of_heads, of_kv_heads = _head_bytes(sizes)
    if model.rotary_dim and kind.rotary:
        # Slices of the model's tables, or with positions of its own a copy in each layer.
        table = program.sequence * model.rotary_dim * _WIDE if layout.cp > 1 else 0
        io_bytes = 2 * (of_heads + of_kv_heads)
        yield Op("attn.rope", "rotation", saved=(table, table), io_bytes=io_bytes)
    sums = sizes.tokens * sizes.heads * _WIDE  # the log-sum-exp
    of_keys = of_heads if spreads(program, kind) else of_kv_heads
    # The rows' segments in ring order.
    has_segments = program.target.packed and is_ring(program)
    segments = sizes.rows * sizes.span * _INT64 if has_segments else 0
    steps = ring_steps(program, kind, cp_rank)
    # Ulysses spreads the heads over cp, too.
    head_ranks = layout.cp if layout.cp_kind == "ulysses" else 1
    heads = sizes.heads * sizes.head_dim
    yield Op(
        "attn.core",
        "attention",
        flops=4.0 * heads * sizes.rows * pairs(program, kind, cp_rank) / head_ranks,
        saved=(of_heads, of_keys, of_keys, of_heads, sums),  # q, k, v, the result
        kept=by_steps((of_heads, sums), steps),
        indices=segments,
        backward=ATTENTION_BACKWARD,
    )
    # Some give their result in another order than the product wants it.
    is_copied = is_plain(program) or (layout.cp > 1 and layout.cp_kind == "ulysses")
    is_copied |= model.value_dim < model.core_dim
    last = attention_linears(model)[-1]
    of_values = sizes.tokens * shard_size(program, last.inner) * sizes.element
    if model.attention_gate:  # it keeps the gate, and the result as its product wants it
        gated = of_values, of_values if is_copied else 0
        yield Op("attn.gated", "activation", saved=gated, io_bytes=3 * of_values)
        is_copied = True
    inputs = Inputs(program, sizes, of_values if is_copied else 0, of_values)
    yield from inputs.operations(last, row_kept(program, sizes))


def _head_bytes(sizes: Sizes) -> tuple[int, int]:
    """Return the bytes of all local queries, and those of all local keys (or values)."""
    of_head = sizes.tokens * sizes.head_dim * sizes.element
    return sizes.heads * of_head, sizes.kv_heads * of_head


def backward_workspaces(program: Program, sizes: Sizes, kind: LayerSpec) -> Iterator[Workspace]:
    """Yield the workspaces of the backward of attention's operations, the last operation of the
    forward first."""
    model = program.model
    of_heads, of_kv = _head_bytes(sizes)
    *columns, last = attention_linears(model)
    # Attention keeps its result, which is the input of that product.
    of_values = sizes.tokens * shard_size(program, last.inner) * sizes.element
    yield from row_workspaces(program, sizes, last, waits=of_values)
    of_gate = of_heads if model.attention_gate else 0
    if of_gate:  # of what entered the product, of the result and of the gate
        yield Workspace("attn.gated", 4 * of_gate)
    sinks = ("attn.sinks",) if model.attention_sinks else ()
    blocks = kernel_bytes(program, sizes, kind)
    yield Workspace("attn.core", of_gate + 2 * of_heads + 2 * of_kv + blocks, sinks)
    if model.rotary_dim and kind.rotary:
        yield Workspace("attn.rope", of_gate + 2 * of_heads + 2 * of_kv)
    if model.is_latent:
        yield from mla.backward_workspaces(program, sizes, 2 * of_heads + of_kv)
        return
    # The gradients of all that came, and what an RMSNorm makes of one.
    grads, norms = of_gate + of_heads + 2 * of_kv, {"attn.k_norm": of_kv, "attn.q_norm": of_heads}
    if model.qk_norm == "all" and program.layout.tp > 1:  # of both at once
        made_bytes = sum(rms_norm_bytes(sizes, size) for size in norms.values())
        weights = tuple(f"{name}.weight" for name in reversed(norms))
        yield Workspace("attn.q_norm", grads + made_bytes, weights)
    elif model.qk_norm != "none":
        for name, size in norms.items():
            yield Workspace(name, grads + rms_norm_bytes(sizes, size), (f"{name}.weight",))
    yield from column_workspaces(program, sizes, columns)


def kernel_bytes(program: Program, sizes: Sizes, kind: LayerSpec) -> int:
    """Return the workspace of the backward of blockwise attention on a CPU, without gradients; 0
    for other kernels."""
    model, train, target = program.model, program.train, program.target
    if is_ring(program) or target.packed or target.traits.has_masked_attention:
        return 0
    # Ulysses attends over whole rows, with its share of the heads.
    cp = program.layout.cp
    heads, kv_heads = sizes.heads // cp, sizes.kv_heads // cp
    length = cp * sizes.tokens // sizes.rows
    sees = ScoreBounds.of(model, kind)
    if not by_blocks(heads, kv_heads, length, train.precision, sees):
        return 0
    cut = Cut.of(sizes.rows, heads, kv_heads, length, model.core_dim, sees)
    return cut.backward_bytes(sizes.element)


def norm_messages(program: Program, sizes: Sizes, passes: int) -> Iterator[Collective]:
    """Yield the sums over tp for norms of queries and keys over all heads: two numbers per
    token."""
    if program.model.qk_norm != "all":
        return
    size, often = 2 * _WIDE * sizes.tokens, passes * (program.layout.recompute == "full")
    counts: tuple[tuple[Phase, int, str], ...] = (
        ("forward", passes, "sum the squares of queries and keys"),
        ("recompute", often, "sum the squares of queries and keys"),
        ("backward", passes, "sum what their norms' scales get"),
    )
    for phase, count, label in counts:
        reason = f"{phase}: {label}"
        yield Collective("all_reduce", "tp", size, count, phase, "layer", reason)


def context_messages(program: Program, sizes: Sizes, layers: int) -> Iterator[Collective]:
    """Yield the messages of context parallelism in so many layers.

    Ring (arXiv:2310.01889): the keys and values visit each other rank; in the backward, their
    gradient sums in fp32 travel with them. Ulysses: arXiv:2309.14509. A recomputed forward sends
    its messages again, also with selective recomputation.
    """
    layout, passes = program.layout, program.microbatches * layers
    recomputed = 0 if layout.recompute == "none" else passes
    of_keys = 2 * sizes.tokens * sizes.kv_heads * sizes.head_dim
    of_queries = sizes.tokens * sizes.heads * sizes.head_dim
    keys = of_keys * sizes.element
    phases: tuple[tuple[Phase, int], ...] = (
        ("forward", passes),
        ("recompute", recomputed),
        ("backward", passes),
    )

    def message(
        kind: CollectiveKind, size: int, count: int, phase: Phase, label: str
    ) -> Collective:
        reason = f"{phase}: {label}"
        return Collective(kind, "cp", size, count, phase, "attention", reason)

    if layout.cp_kind == "ulysses":
        for phase, count in phases:
            for numbers, label in (
                (of_queries + of_keys, "positions of q, k and v for heads"),
                (of_queries, "heads of the result for positions"),
            ):
                yield message("all_to_all", numbers * sizes.element, count, phase, label)
        return
    steps = layout.cp - 1
    for kind, way in _WAYS:
        for phase, count in phases:
            yield message(kind, keys, steps * count, phase, f"keys and values {way}")
        label = f"the keys' gradients {way}"
        yield message(kind, of_keys * _WIDE, steps * passes, "backward", label)
