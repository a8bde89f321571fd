"""The operations of one rank: what each computes, and what it saves for the backward.

All sizes are those of one microbatch on one rank, after sharding by tp, sp and cp. Saved tensors
follow the modules of `models` and `parallel` on a CPU, run eagerly; on CUDA, the same tensors are
saved, except for a mask. A test compares the bytes with what autograd really saves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from meshwright.program.layers import delta, mixers, mlp
from meshwright.program.layers.linears import Inputs, row_kept
from meshwright.program.lower import Program
from meshwright.program.mixture import expert_operations
from meshwright.program.saved import (
    FROZEN_BACKWARD,
    PRODUCT_BACKWARD,
    Bytes,
    Kind,
    Op,
    by_steps,
    moved_of,
    total,
)
from meshwright.program.scores import is_plain, is_ring, pairs, ring_steps, spreads
from meshwright.program.sizes import Sizes
from meshwright.program.stages import Stage
from meshwright.spec.model import LayerSpec, ModelSpec

# Five products against two: the scores anew, and the gradients of the weights, v, q and k.
# FlashAttention, arXiv:2205.14135, algorithm 4.
ATTENTION_BACKWARD: Final = 2.5
_WIDE: Final = 4  # bytes of statistics, the softmax and the rotary tables: fp32 in any precision
_INT64: Final = 8


@dataclass(frozen=True)
class Operation:
    """One operation of a stage, for one microbatch on one rank.

    `name` is that of its module, with `*` for the number of the layer, and `count` the number of
    equal operations in the stage, in layers of the kind `layer` (None: outside of layers). `flops`
    are those of the forward, only for products and attention: the rest is memory-bound.
    `saved_bytes` is what it saves for the backward; a shared tensor counts at its first operation.
    `moved_bytes` of them are in host memory until then if activations are offloaded.
    `normed_bytes` is the size of a norm's input and output. `backward` is the number of products of
    this size in the backward: one for a frozen weight. `io_bytes` are what a memory-bound forward
    reads and writes, each once; not of norms.
    """

    name: str
    kind: Kind
    stage: int
    flops: float
    saved_bytes: int
    count: int
    normed_bytes: int = 0
    layer: LayerSpec | None = None
    backward: float = PRODUCT_BACKWARD
    moved_bytes: int = 0
    io_bytes: int = 0


def operations(
    program: Program,
    stage: Stage,
    *,
    cp_rank: int = 0,
    recomputed: bool = False,
) -> tuple[Operation, ...]:
    """Return the operations of a stage, in order, for one microbatch on one rank.

    Every tp rank has the same. `cp_rank` matters under ring attention: with a window, ranks compute
    different numbers of pairs, and selective recomputation saves every step's result. `recomputed`:
    what layers save is what a second forward recomputes, for one block at a time.
    """
    sizes = Sizes.of(program)
    index = stage.index
    kinds = Counter(program.model.layer(layer) for layer in stage.layers)
    ops = []
    if stage.is_first:
        # Under tp the local ids, if it is trained, and where they are another rank's; else the
        # batch's own ids.
        saved = sizes.tokens * (_INT64 + 1) if program.layout.tp > 1 else 0
        saved = 0 if program.model.lora is not None else saved
        ops.append(
            Operation("embed", "embedding", index, 0.0, saved, 1, io_bytes=2 * sizes.stream_bytes)
        )
    ops += (
        Operation(
            f"layers.*.{op.name}",
            *(op.kind, index, op.flops, saved, count, op.normed, kind, op.backward, moved),
            io_bytes=op.io_bytes,
        )
        for kind, count in kinds.items()
        for op, saved, moved in _layer(program, sizes, kind, cp_rank, recomputed)
    )
    if stage.is_last:
        ops += (
            Operation(
                op.name,
                *(op.kind, index, op.flops, total(op.saved), 1, op.normed, None, op.backward),
            )
            for op in _end(program, sizes)
        )
    return tuple(ops)


def _layer(
    program: Program, sizes: Sizes, kind: LayerSpec, cp_rank: int, recomputed: bool
) -> Iterator[tuple[Op, int, int]]:
    """Yield the operations of a layer, the bytes that each keeps, and those that offload moves."""
    recompute = "none" if recomputed else program.layout.recompute
    ops = (
        *_attention(program, sizes, kind, cp_rank),
        *_feed_forward(program, sizes, kind),
    )
    # The layer's dropout keys, in the context that a second forward starts from, too.
    keys = sizes.rows * _INT64 if program.model.drops else 0
    if recompute != "none":
        yield Op("input", "block"), sizes.stream_bytes, sizes.stream_bytes
    for op in ops:
        saved: Bytes = {"none": op.saved, "selective": op.kept, "full": 0}[recompute]
        indices = op.indices if recompute == "none" else 0
        moved = moved_of(saved, sizes.least_moved)
        yield op, total(saved) + indices, moved
    if keys:
        yield Op("dropout", "dropout", io_bytes=2 * sizes.stream_bytes), keys, 0


def _norm(program: Program, sizes: Sizes, name: str, shares_input: bool = False) -> Op:
    """Return a norm: it keeps its input and, for each token, the scale, or the mean and the scale.

    LayerNorm has its statistics in the dtype of its input, RMSNorm in fp32.
    """
    is_rms, taken = program.model.norm == "rms", sizes.stream_bytes
    statistics = (sizes.stream * _WIDE,) if is_rms else (sizes.stream * sizes.element,) * 2
    return Op(name, "norm", saved=(*statistics, 0 if shares_input else taken), normed=taken)


def _head_norm(sizes: Sizes, name: str, heads: int, statistics: int, sums: int = 0) -> Op:
    """Return an RMSNorm of heads: it keeps them, and in fp32 so many scales for each token."""
    taken = sizes.tokens * heads * sizes.head_dim * sizes.element
    saved = taken, sizes.tokens * statistics * _WIDE
    return Op(name, "norm", saved=saved, kept=sums, normed=taken)


def _attention(program: Program, sizes: Sizes, kind: LayerSpec, cp_rank: int) -> Iterator[Op]:
    if not kind.mixes:
        return
    if program.model.norms_before:
        yield _norm(program, sizes, "attn_norm")
    if kind.delta:
        yield from delta.operations(program, sizes)
    if kind.attends:
        heads_of = _latent_heads if program.model.is_latent else _heads
        yield from heads_of(program, sizes)
        yield from _core(program, sizes, kind, cp_rank)
    if kind.mixer is not None:
        yield from mixers.operations(program, sizes, kind.mixer)
    if program.model.norms_after:
        yield _norm(program, sizes, "attn_post_norm")


def _latent_heads(program: Program, sizes: Sizes) -> Iterator[Op]:
    """Yield what latent attention makes queries, keys and values by.

    Every rank of tp makes the latent vectors whole. The norms keep them: the one of keys all of
    what it is a part of.
    """
    model, line = program.model, sizes.tokens * sizes.element
    first = Inputs.of_stream(program, sizes)

    def low(name: str, width: int, part: int = 0) -> Iterator[Op]:
        rank, wide = width - part, sizes.tokens * _WIDE
        yield from first.product(f"{name}_a", sizes.dim, width, line * width)
        normed = line * rank
        yield Op(f"{name}_a_norm", "norm", saved=(line * width, wide), normed=normed)
        columns = sizes.heads * latent_widths(model)[name]
        yield from Inputs(program, sizes, normed).product(
            f"{name}_b", rank, columns, line * columns
        )

    if model.q_lora_rank:
        yield from low("attn.q", model.q_lora_rank)
    else:
        columns = sizes.heads * model.head_dim
        yield from first.product("attn.q", sizes.dim, columns, line * columns)
    shared = model.qk_rope_head_dim
    yield from low("attn.kv", model.kv_lora_rank + shared, shared)


def latent_widths(model: ModelSpec) -> Mapping[str, int]:
    """Return the widths per head of the outputs of latent attention's second projections."""
    return {"attn.q": model.head_dim, "attn.kv": model.qk_nope_head_dim + model.v_head_dim}


def _heads(program: Program, sizes: Sizes) -> Iterator[Op]:
    """Yield what queries, keys and values are made by."""
    model, layout = program.model, program.layout
    heads, kv_heads = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    of_heads = sizes.tokens * heads * sizes.element
    of_kv_heads = sizes.tokens * kv_heads * sizes.element
    # q, k and v have one input. The results of products are kept by the selective policy.
    inputs = Inputs.of_stream(program, sizes)
    yield from inputs.product("attn.q", sizes.dim, heads, of_heads)
    yield from inputs.product("attn.k", sizes.dim, kv_heads, of_kv_heads)
    yield from inputs.product("attn.v", sizes.dim, kv_heads, of_kv_heads)
    if model.attention_gate:
        yield from inputs.product("attn.gate", sizes.dim, heads, of_heads)
    if model.qk_norm != "none":
        per_head = model.qk_norm == "head"
        # The sums of both over tp, in one message, which the selective policy keeps.
        is_sent = layout.tp > 1 and not per_head
        sent, of_q, of_k = (2 * sizes.tokens * _WIDE, 2, 0) if is_sent else (0, 1, 1)
        yield _head_norm(sizes, "attn.q_norm", sizes.heads, sizes.heads if per_head else of_q, sent)
        yield _head_norm(sizes, "attn.k_norm", sizes.kv_heads, sizes.kv_heads if per_head else of_k)


def _core(program: Program, sizes: Sizes, kind: LayerSpec, cp_rank: int) -> Iterator[Op]:
    """Yield the rotation, attention and the product after it."""
    model, layout = program.model, program.layout
    heads, kv_heads = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    of_heads = sizes.tokens * heads * sizes.element
    of_kv_heads = sizes.tokens * kv_heads * sizes.element
    if model.rotary_dim and kind.rotary:
        # Slices of the model's tables, or with positions of its own a copy in each layer.
        table = program.sequence * model.rotary_dim * _WIDE if layout.cp > 1 else 0
        yield Op(
            "attn.rope", "rotation", saved=(table, table), io_bytes=2 * (of_heads + of_kv_heads)
        )
    sums = sizes.tokens * sizes.heads * _WIDE  # the log-sum-exp
    of_keys = of_heads if spreads(program, kind) else of_kv_heads
    # The rows' segments in ring order.
    has_segments = program.target.packed and is_ring(program)
    segments = sizes.rows * sizes.span * _INT64 if has_segments else 0
    steps = ring_steps(program, kind, cp_rank)
    yield Op(
        "attn.core",
        "attention",
        flops=4.0 * heads * sizes.rows * pairs(program, kind, cp_rank) / _head_ranks(program),
        saved=(of_heads, of_keys, of_keys, of_heads, sums),  # q, k, v, the result
        kept=by_steps((of_heads, sums), steps),
        indices=segments,
    )
    # Some give their result in another order than the product wants it.
    is_copied = is_plain(program) or (layout.cp > 1 and layout.cp_kind == "ulysses")
    is_copied |= model.value_dim < model.core_dim
    values = sizes.heads * model.value_dim
    of_values = sizes.tokens * values * sizes.element
    if model.attention_gate:  # it keeps the gate, and the result as its product wants it
        gated = of_values, of_values if is_copied else 0
        yield Op("attn.gated", "activation", saved=gated, io_bytes=3 * of_values)
        is_copied = True
    inputs = Inputs(program, sizes, of_values if is_copied else 0, of_values)
    yield from inputs.product("attn.o", values, sizes.dim, row_kept(program, sizes))


def _feed_forward(program: Program, sizes: Sizes, kind: LayerSpec) -> Iterator[Op]:
    if not kind.feeds:
        return
    if program.model.norms_before:
        yield _norm(program, sizes, "mlp_norm", shares_input=program.model.parallel_residual)
    has_experts = program.model.has_experts(kind)
    yield from expert_operations(program, sizes) if has_experts else mlp.operations(program, sizes)
    if program.model.norms_after:
        yield _norm(program, sizes, "mlp_post_norm")


def _end(program: Program, sizes: Sizes) -> Iterator[Op]:
    """Yield what comes after the layers; the backward computes all but the norm."""
    yield _norm(program, sizes, "norm")
    backward = PRODUCT_BACKWARD if program.model.lora is None else FROZEN_BACKWARD
    flops = sizes.product(sizes.dim, sizes.vocab)
    yield Op("head", "product", flops, sizes.stream_bytes, backward=backward)
    yield Op("loss", "loss", saved=_WIDE)  # where its sum will be


def _head_ranks(program: Program) -> int:
    """Return over how many ranks attention spreads the heads beside tp: cp with Ulysses."""
    return program.layout.cp if program.layout.cp_kind == "ulysses" else 1
