"""How many attention scores a rank computes, and in how many blocks."""

from __future__ import annotations

from meshwright.program.attention import UNBOUNDED, ScoreBounds, by_blocks, causal_scores
from meshwright.program.lower import Program
from meshwright.program.ring import causal_pieces, ring_totals
from meshwright.spec.model import LayerSpec


def pairs(program: Program, kind: LayerSpec, cp_rank: int) -> float:
    """Return the (query, key) pairs that a rank's attention computes per sequence and head.

    Half of a square, and less with a window, because a kernel knows that it is causal. Packed
    sequences cost at most as much as a single document; how much less depends on the data. The ring
    computes pieces of its own keys and the other ranks', as listed by `program.ring`.
    """
    bounds, span = ScoreBounds.of(program.model, kind), program.train.seq_len
    if is_ring(program):
        if program.target.traits.has_masked_attention:
            bounds = bounds._replace(cap=None)
        plain = is_plain(program) or bounds.cap is not None
        totals = ring_totals(span, program.layout.cp, cp_rank, bounds)
        return totals.plain_pairs if plain else totals.pairs
    if program.target.packed and not program.target.traits.has_masked_attention:
        return sum(piece.pairs(bounds.cap is not None) for piece in causal_pieces(span, bounds))
    bounds, target = bounds.within(span), program.target
    is_masked = bounds != UNBOUNDED and not target.traits.has_masked_attention
    shape = program.model.n_heads, program.model.n_kv_heads, span, program.train.precision
    if is_masked and not by_blocks(*shape, bounds):
        return float(span * span)
    return causal_scores(span, bounds.window)


def is_ring(program: Program) -> bool:
    """Whether keys and values pass around the cp ranks."""
    return program.layout.cp > 1 and program.layout.cp_kind == "ring"


def is_plain(program: Program) -> bool:
    """Whether ring attention uses plain torch operations: on CPUs with packed sequences in fp16."""
    is_packed_ring = is_ring(program) and program.target.packed
    is_masked = is_packed_ring and not program.target.traits.has_masked_attention
    return is_masked and program.train.precision == "fp16"


def spreads(program: Program, kind: LayerSpec) -> bool:
    """Whether key heads are copied for each query head: a GPU's fp32 attention kernel needs that.

    The kernels for the ring and for packed sequences do not.
    """
    bounds, target = ScoreBounds.of(program.model, kind), program.target
    is_bounded = target.packed or bounds.within(program.train.seq_len) != UNBOUNDED
    is_grouped = not is_bounded and not is_ring(program) and target.traits.repeats_kv_heads
    return is_grouped and program.train.precision == "fp32"


def ring_steps(program: Program, kind: LayerSpec, cp_rank: int) -> float:
    """Return the number of partial results of ring attention, in units of all of a rank's queries;
    1 without a ring."""
    if not is_ring(program):
        return 1.0
    bounds = ScoreBounds.of(program.model, kind)
    totals = ring_totals(program.train.seq_len, program.layout.cp, cp_rank, bounds)
    is_whole = program.target.traits.has_masked_attention
    rows = totals.whole_rows if is_whole else totals.rows
    return rows / program.sequence
