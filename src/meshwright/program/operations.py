"""The operations of one rank: what each computes, and what it keeps until the backward.

All sizes are those of one microbatch on one rank, after tp, sp and cp have cut them. What is kept
follows the modules of `models` and `execute` on a CPU, run eagerly; on CUDA the same tensors are
kept, a mask aside. A test holds the bytes against what autograd really keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from meshwright.layout.schedules import SCHEDULES
from meshwright.program.attention import UNBOUNDED, ScoreBounds, by_blocks, causal_scores
from meshwright.program.lower import Program
from meshwright.program.ring import causal_pieces, ring_totals
from meshwright.program.sizes import Sizes
from meshwright.program.stages import Stage
from meshwright.spec.model import LayerSpec

Kind = Literal[
    "embedding",
    "block",
    "mask",
    "norm",
    "product",
    "rotation",
    "attention",
    "activation",
    "routing",
    "dropout",
    "loss",
]

# The backward of a product has two of its size: one for the input, one for the weight.
PRODUCT_BACKWARD: Final = 2
# Five products against two: the scores anew, and the gradients of the weights, v, q and k.
# FlashAttention, arXiv:2205.14135, algorithm 4.
ATTENTION_BACKWARD: Final = 2.5
_WIDE: Final = 4  # bytes of statistics, the softmax and the rotary tables: fp32 in any precision
_INT64: Final = 8


@dataclass(frozen=True)
class Operation:
    """One operation of a stage, for one microbatch on one rank.

    `name` is that of its module, with `*` for the number of the layer, and `count` how many alike
    the stage has, in layers of the kind `layer` (None: outside of layers). `flops` are those of the
    forward, of products and attention only: the rest moves memory. `saved_bytes` is what it keeps
    until the backward, in bytes: a tensor that several share is counted at the first of them.
    `normed_bytes` is the size of what a norm takes, and returns.
    """

    name: str
    kind: Kind
    stage: int
    flops: float
    saved_bytes: int
    count: int
    normed_bytes: int = 0
    layer: LayerSpec | None = None


class _Op(NamedTuple):
    """An operation of a layer: `saved` without recomputation, `kept` with the selective one."""

    name: str
    kind: Kind
    flops: float = 0.0
    saved: int = 0
    kept: int = 0
    normed: int = 0


def is_joint(program: Program) -> bool:
    """Whether our own function computes the products of one input together, see `execute.deferred`.

    Under tp, and where weight gradients may be deferred.
    """
    layout = program.layout
    return layout.tp > 1 or (layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward)


def gathers_again(program: Program) -> bool:
    """Whether the backward gathers what column-parallel layers took, of the share that is kept.

    arXiv:2205.05198, section 4.2.2. After a second forward the backward comes at once, and uses
    what that has gathered.
    """
    layout = program.layout
    return layout.tp > 1 and layout.sp and layout.recompute == "none"


def operations(
    program: Program,
    stage: Stage,
    *,
    cp_rank: int = 0,
    recomputed: bool = False,
) -> tuple[Operation, ...]:
    """Return the operations of a stage, in order, for one microbatch on one rank.

    Every rank of tp has the same. `cp_rank` matters under ring attention: with a window ranks
    compute unlike numbers of pairs, and selective recomputation keeps every step's result.
    `recomputed`: what layers keep is what a second forward makes anew, for one block at a time.
    """
    sizes = Sizes.of(program)
    index = stage.index
    kinds = Counter(program.model.layer(layer) for layer in stage.layers)
    found = []
    if stage.is_first:
        # Under tp the local ids and where they are another rank's; else the batch's own ids.
        saved = sizes.tokens * (_INT64 + 1) if program.layout.tp > 1 else 0
        found.append(Operation("embed", "embedding", index, 0.0, saved, 1))
    found += (
        Operation(f"layers.*.{op.name}", op.kind, index, op.flops, saved, count, op.normed, kind)
        for kind, count in kinds.items()
        for op, saved in _layer(program, sizes, kind, cp_rank, recomputed)
    )
    if stage.is_last:
        found += (
            Operation(op.name, op.kind, index, op.flops, op.saved, 1, op.normed)
            for op in _end(program, sizes)
        )
    return tuple(found)


def _layer(
    program: Program, sizes: Sizes, kind: LayerSpec, cp_rank: int, recomputed: bool
) -> Iterator[tuple[_Op, int]]:
    """Yield the operations of a layer, and the bytes that each keeps under the recompute policy."""
    recompute = "none" if recomputed else program.layout.recompute
    ops = (
        *_attention(program, sizes, kind, cp_rank),
        *_feed_forward(program, sizes, kind),
    )
    # The layer's dropout keys, in the context that a second forward starts from, too.
    keys = sizes.rows * _INT64 if program.model.dropout else 0
    if recompute != "none":
        yield _Op("input", "block"), sizes.stream_bytes
    for op in ops:
        yield op, {"none": op.saved, "selective": op.kept, "full": 0}[recompute]
    if keys:
        yield _Op("dropout", "dropout"), keys


def _norm(program: Program, sizes: Sizes, name: str, shares_input: bool = False) -> _Op:
    """Return a norm: it keeps its input and, for each token, the scale, or the mean and the scale.

    LayerNorm has its statistics in the dtype of its input, RMSNorm in fp32.
    """
    is_rms, taken = program.model.norm == "rms", sizes.stream_bytes
    statistics = sizes.stream * (_WIDE if is_rms else 2 * sizes.element)
    return _Op(name, "norm", saved=statistics + (0 if shares_input else taken), normed=taken)


def _head_norm(sizes: Sizes, name: str, heads: int, statistics: int, kept: int = 0) -> _Op:
    """Return an RMSNorm of heads: it keeps them, and in fp32 so many scales for each token."""
    taken = sizes.tokens * heads * sizes.head_dim * sizes.element
    saved = taken + sizes.tokens * statistics * _WIDE
    return _Op(name, "norm", saved=saved, kept=kept, normed=taken)


def _attention(program: Program, sizes: Sizes, kind: LayerSpec, cp_rank: int) -> Iterator[_Op]:
    model, layout = program.model, program.layout
    heads, kv_heads = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    of_heads = sizes.tokens * heads * sizes.element
    of_kv_heads = sizes.tokens * kv_heads * sizes.element
    if model.norms_before:
        yield _norm(program, sizes, "attn_norm")
    # q, k and v have one input. The results of products are kept by the selective policy.
    into_heads, into_kv = sizes.product(sizes.dim, heads), sizes.product(sizes.dim, kv_heads)
    yield _Op("attn.q", "product", into_heads, _input_kept(program, sizes), of_heads)
    yield _Op("attn.k", "product", into_kv, 0, of_kv_heads)
    yield _Op("attn.v", "product", into_kv, 0, of_kv_heads)
    if model.qk_norm != "none":
        each = model.qk_norm == "head"
        # The sums of both over tp, which the selective policy keeps.
        sent = 2 * sizes.tokens * _WIDE if layout.tp > 1 and not each else 0
        yield _head_norm(sizes, "attn.q_norm", sizes.heads, sizes.heads if each else 1, sent)
        yield _head_norm(sizes, "attn.k_norm", sizes.kv_heads, sizes.kv_heads if each else 1)
    if model.rotary_dim and kind.rotary:
        # Slices of the model's tables, or with positions of its own a copy in each layer.
        tables = 2 * program.sequence * model.rotary_dim * _WIDE if layout.cp > 1 else 0
        yield _Op("attn.rope", "rotation", saved=tables)
    sums = sizes.tokens * sizes.heads * _WIDE  # the log-sum-exp
    saved = of_heads + 2 * of_kv_heads + of_heads + sums  # q, k, v, the result
    if program.target.packed and _is_ring(program):
        saved += sizes.rows * sizes.span * _INT64  # the rows' segments in ring order
    steps = _ring_steps(program, kind, cp_rank)
    yield _Op(
        "attn.core",
        "attention",
        flops=4.0 * heads * sizes.rows * _pairs(program, kind, cp_rank) / _head_ranks(program),
        saved=saved,
        kept=int((of_heads + sums) * steps),
    )
    # Some give their result in another order than the product wants it.
    is_copied = _is_plain(program) or (layout.cp > 1 and layout.cp_kind == "ulysses")
    yield _Op(
        "attn.o",
        "product",
        sizes.product(heads, sizes.dim),
        of_heads if is_copied else 0,
        _row_kept(program, sizes),
    )
    if model.norms_after:
        yield _norm(program, sizes, "attn_post_norm")


def _feed_forward(program: Program, sizes: Sizes, kind: LayerSpec) -> Iterator[_Op]:
    if program.model.norms_before:
        yield _norm(program, sizes, "mlp_norm", shares_input=program.model.parallel_residual)
    has_experts = program.model.has_experts(kind)
    yield from expert_operations(program, sizes) if has_experts else _mlp(program, sizes)
    if program.model.norms_after:
        yield _norm(program, sizes, "mlp_post_norm")


def _mlp(program: Program, sizes: Sizes) -> Iterator[_Op]:
    hidden = sizes.tokens * sizes.ffn * sizes.element
    flops = sizes.product(sizes.dim, sizes.ffn)
    if program.model.gated_mlp:
        yield _Op("mlp.gate", "product", flops, _input_kept(program, sizes), hidden)
        yield _Op("mlp.up", "product", flops, 0, hidden)
        yield _Op("mlp.act", "activation", saved=2 * hidden)  # gate and up; act(gate) is made again
    else:
        yield _Op("mlp.up", "product", flops, _input_kept(program, sizes), hidden)
        yield _Op("mlp.act", "activation", saved=hidden)
    yield _Op("mlp.down", "product", flops, hidden, _row_kept(program, sizes))


def expert_operations(program: Program, sizes: Sizes) -> Iterator[_Op]:
    """Yield the operations of a router, of the experts and of the shared one.

    All are inside of the part that tp cuts, and take the tokens of all its ranks.
    """
    model, el = program.model, sizes.element
    scores = sizes.tokens * model.experts * _WIDE
    beside = sizes.tokens * sizes.shared_ffn * el
    flops = sizes.product(sizes.dim, sizes.shared_ffn)
    tokens = sizes.whole_bytes  # counted at the first that keeps them
    if model.shared_ffn_dim:
        yield _Op("mlp.shared.gate", "product", flops, tokens, beside)
        yield _Op("mlp.shared.up", "product", flops, 0, beside)
        yield _Op("mlp.shared.act", "activation", saved=2 * beside)
        yield _Op("mlp.shared.down", "product", flops, beside, sizes.whole_bytes)
    if model.shared_gate:
        one = sizes.tokens * el  # a number of each token
        # Its sigmoid, and what that multiplies.
        yield _Op("mlp.shared_gate", "product", sizes.product(sizes.dim, 1), 0, one)
        yield _Op("mlp.shared_gate.act", "activation", saved=one + sizes.whole_bytes)
    # The tokens, their softmax and the experts that were picked.
    picked = sizes.pairs * _INT64
    yield _Op(
        "mlp.router",
        "product",
        sizes.product(sizes.dim, model.experts),
        scores + picked + (0 if model.shared_ffn_dim else tokens),
        scores,
    )
    # The pairs' shares, their tokens and places, and how many an expert has.
    order = sizes.pairs * (_WIDE + 2 * _INT64) + model.experts * _INT64
    hidden = sizes.pairs * sizes.expert_ffn * el
    results = sizes.pairs * sizes.dim * el
    if program.layout.ep > 1:  # what has come is kept with it, and once more how it is sent back
        order += results + sizes.pairs * 2 * _INT64 + model.experts // program.layout.ep * _INT64
    yield _Op("mlp.experts.order", "routing", saved=order)
    yield _Op("mlp.experts.gate", "product", sizes.expert_product, 0, hidden)
    yield _Op("mlp.experts.up", "product", sizes.expert_product, 0, hidden)
    yield _Op("mlp.experts.act", "activation", saved=2 * hidden)
    # Under tp the sum over the ranks is kept too.
    summed = sizes.stream_bytes if program.layout.tp > 1 else 0
    yield _Op("mlp.experts.down", "product", sizes.expert_product, 0, results + summed)


def _input_kept(program: Program, sizes: Sizes) -> int:
    """Return what column-parallel layers keep of the stream: with sp their share, or all of it."""
    return sizes.stream_bytes if gathers_again(program) else sizes.whole_bytes


def _row_kept(program: Program, sizes: Sizes) -> int:
    """Return what selective recomputation keeps of a product that leaves the cut part of a block.

    The partial sums, and under tp also what the other ranks made of them.
    """
    return sizes.whole_bytes + (sizes.stream_bytes if program.layout.tp > 1 else 0)


def _end(program: Program, sizes: Sizes) -> Iterator[_Op]:
    """Yield what comes after the layers; the backward computes all but the norm."""
    yield _norm(program, sizes, "norm")
    yield _Op("head", "product", sizes.product(sizes.dim, sizes.vocab), sizes.stream_bytes)
    yield _Op("loss", "loss", saved=_WIDE)  # where its sum will be


def _head_ranks(program: Program) -> int:
    """Return over how many ranks attention spreads the heads beside tp: cp with Ulysses."""
    return program.layout.cp if program.layout.cp_kind == "ulysses" else 1


def _pairs(program: Program, kind: LayerSpec, cp_rank: int) -> float:
    """Return how many pairs of query and key the attention of one row and head computes here.

    Half of a square and what a window leaves of it, since a kernel is told that it is causal.
    Packed rows cost at most as much as where each is one document; how much less is up to the data.
    The ring computes pieces of its own and the other ranks' keys, as `program.ring` cuts them.
    """
    bounds, span = ScoreBounds(kind.window, program.model.attention_softcap), program.train.seq_len
    if _is_ring(program):
        plain = _is_plain(program) or bounds.cap is not None
        totals = ring_totals(span, program.layout.cp, cp_rank, bounds)
        return totals.plain_pairs if plain else totals.pairs
    if program.target.packed and program.target.on_cpu:
        return sum(piece.pairs(bounds.cap is not None) for piece in causal_pieces(span, bounds))
    bounds, target = bounds.within(span), program.target
    is_masked = target.on_cpu and bounds != UNBOUNDED
    shape = program.model.n_heads, program.model.n_kv_heads, span, program.train.precision
    if is_masked and not by_blocks(*shape, bounds):
        return float(span * span)
    return causal_scores(span, bounds.window)


def _is_ring(program: Program) -> bool:
    return program.layout.cp > 1 and program.layout.cp_kind == "ring"


def _is_plain(program: Program) -> bool:
    """Whether the ring computes in plain operations: the CPU's kernel takes no mask in fp16."""
    return _is_ring(program) and program.target.packed and program.train.precision == "fp16"


def _ring_steps(program: Program, kind: LayerSpec, cp_rank: int) -> float:
    """Return how many results of a block the ring computes, in those of all of its queries."""
    if not _is_ring(program):
        return 1.0
    bounds = ScoreBounds(kind.window, program.model.attention_softcap)
    totals = ring_totals(program.train.seq_len, program.layout.cp, cp_rank, bounds)
    return totals.rows / program.sequence
