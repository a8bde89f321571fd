"""Bytes of one rank at the peak of a step, by category, each with its formula."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.layout import Layout
from meshwright.predict.calibration import Calibration
from meshwright.predict.catalogue import Device
from meshwright.predict.stacks import CAUSAL, Stack
from meshwright.predict.work import LayoutWork, weights
from meshwright.program.schedule import compute_tables, peak_in_flight
from meshwright.spec.model import ModelSpec

_FP32 = 4
_NOTHING_AGAIN = Layout()
_MOMENTS = 8  # AdamW: two fp32 numbers, arXiv:1711.05101


class Term(NamedTuple):
    """A part of a rank's memory: its category, bytes, and the formula with its numbers."""

    category: str
    bytes: float
    formula: str


class Held(NamedTuple):
    """What a pipeline rank holds: its layers, whether the embedding, whether the head."""

    layers: int
    has_embedding: bool
    has_head: bool


def model_states(model: ModelSpec, layout: Layout, stack: Stack, held: Held, element: int) -> list[Term]:
    """Return weights, gradients and optimizer states of a rank.

    ZeRO, arXiv:1910.02054, section 3.1 and figure 1: stage 1 divides the optimizer's states over
    the ranks that shard, 2 also gradients, 3 also weights. In a stack that keeps shards the fp32
    weights are the master ones, so stage 1 divides them and gathers a compute copy.
    """
    ranks, zero = layout.shard_ranks, layout.zero
    whole, part = _elements(model, layout.tp, 1, held), _elements(model, layout.tp, ranks, held) // ranks
    unit = weights(model, layout.tp, ranks)
    largest = max(unit.layer, unit.embedding * held.has_embedding, unit.head * held.has_head)
    terms = []

    def add(category: str, count: int, size: int, what: str) -> None:
        terms.append(Term(category, count * size, f"{count:,} elements x {size} B: {what}"))

    if stack.keeps == "shards":
        add("weights", part, _FP32, f"fp32 shards over {ranks}")
        if zero == 3:
            add("gathered", 2 * largest, element, "the unit at work and the one gathered ahead")
        elif ranks > 1 or element != _FP32:
            add("gathered", whole, element, "compute copy, kept through the step")
    elif zero == 3:
        add("weights", part, element, f"shards over {ranks}")
        add("gathered", 2 * largest, element, "the unit at work and the one gathered ahead")
    else:
        add("weights", whole, element, "whole")
    sharded_gradients = zero >= 2
    if sharded_gradients:
        add("gradients", part, stack.gradient_bytes, f"sums over {ranks} shards")
        add("gradients", 2 * largest, stack.reduced_bytes, "of the unit at work, and being reduced")
    else:
        add("gradients", whole, stack.gradient_bytes, "accumulated whole")
    states = _MOMENTS + (0 if stack.keeps == "shards" or element == _FP32 else _FP32)
    if layout.offload == "none":
        add("optimizer", part, states, "Adam's moments" + (" and fp32 weights" if states > 8 else ""))
    if layout.offload == "params":
        terms = [term for term in terms if term.category in ("gathered",)]
        add("gradients", 2 * largest, stack.reduced_bytes, "of the unit at work, and being reduced")
    return terms


def _elements(model: ModelSpec, tp: int, ranks: int, held: Held) -> int:
    found = weights(model, tp, ranks)
    total = held.layers * found.layer
    if held.has_embedding or (held.has_head and model.tie_embeddings):
        total += found.embedding
    return total + (found.head if held.has_head else 0)


def activations(
    layout: Layout,
    stack: Stack,
    found: LayoutWork,
    plain: LayoutWork,
    held: Held,
    rank: int,
    microbatches: int,
    calibration: Calibration,
) -> list[Term]:
    """Return what is kept for the backward, and the loss; `plain` is the work without recomputing.

    Kept bytes are those of the program's operations, times the microbatches that the action table
    has in flight on this rank: 1F1B holds `pp - rank`, arXiv:2006.09503; the last rank one.
    """
    flight = in_flight(layout, rank, microbatches)
    norm_bytes = 0.0 if stack.fused_norm else calibration.find("norm_bytes", stack.name)
    per_layer = kept_per_layer(layout, stack, found, norm_bytes)
    whole = sum(kept_per_layer(_NOTHING_AGAIN, stack, plain, norm_bytes).values())
    average = held.layers / max(layout.virtual_stages, 1)
    terms = [
        Term(
            f"activations: {kind}",
            size * average * flight,
            f"{size:,.0f} B x {average:g} layers x {flight:g} in flight",
        )
        for kind, size in per_layer.items()
        if size
    ]
    if layout.recompute != "none":
        terms.append(Term("activations: recomputed layer", whole, f"one layer anew: {whole:,.0f} B"))
    if held.has_head:
        terms += _loss(stack, found, layout.tp, calibration)
    if not CAUSAL[stack.attention]:
        count, size = found.layer.scores, calibration.find("score_bytes", stack.name)
        formula = f"{count:,} scores x {size:g} B of one layer at work, measured"
        terms.append(Term("activations: scores at work", count * size, formula))
    return terms


def kept_per_layer(
    layout: Layout, stack: Stack, found: LayoutWork, norm_bytes: float
) -> dict[str, float]:
    """Return the bytes that a layer keeps of one microbatch, by kind of operation.

    Those of the program; with the kernels of another stack, what these keep more or less.
    """
    sizes = found.sizes
    kept: dict[str, float] = {}
    for op in found.layer.operations:
        kept[op.kind] = kept.get(op.kind, 0.0) + op.saved_bytes
    if layout.recompute == "full" or (layout.recompute == "selective" and stack.selective == "blocks"):
        return kept
    if stack.keeps == "whole":  # gathered anew in the backward, arXiv:2205.05198, section 4.2.2
        kept["product"] -= 2 * (sizes.whole_bytes - sizes.stream_bytes)
    # Two norms of separate operations: the input widened to fp32, and what it was scaled to.
    kept["norm"] += 2 * norm_bytes * sizes.stream * sizes.dim
    if not CAUSAL[stack.attention]:
        # Softmax in the products' dtype and a mask; unfused also the scores, arXiv:2205.05198, 4.1.
        per_score = {"scores": 2 * sizes.element + 1, "softmax": sizes.element + 1}
        kept["scores"] = float(found.layer.scores * per_score[stack.attention])
    if layout.recompute == "selective":
        if stack.selective == "attention":
            kept.pop("scores", None)
        else:
            kept["product"] /= 2
    return kept


def _loss(stack: Stack, found: LayoutWork, tp: int, calibration: Calibration) -> list[Term]:
    """Return the logits, their softmax and gradients, at the loss.

    Their bytes are measured: they depend on how many copies a system makes in which dtype.
    """
    sizes = found.sizes
    count = sizes.tokens * sizes.vocab * (1 if stack.splits_loss else tp)
    size = calibration.find("loss_bytes", stack.name)
    whole = "" if stack.splits_loss or tp == 1 else ", gathered over tp"
    return [Term("logits and loss", count * size, f"{count:,} logits x {size:g} B{whole}, measured")]


@lru_cache(maxsize=4096)
def _flight(schedule: str, pp: int, virtual: int, microbatches: int) -> tuple[int, ...]:
    tables = compute_tables(schedule, pp, virtual, microbatches)
    return tuple(peak_in_flight(table) for table in tables)


def in_flight(layout: Layout, rank: int, microbatches: int) -> float:
    """Return the most activations of one stage and microbatch that a pipeline rank holds."""
    pp, virtual = layout.pp, layout.virtual_stages
    if pp == 1:
        return 1.0
    if layout.schedule == "1f1b":
        return float(min(pp - rank, microbatches))
    if layout.schedule == "naive":
        return 1.0
    if layout.schedule in ("gpipe", "looped_bfs"):
        return float(virtual * microbatches)
    if layout.schedule == "interleaved_1f1b":  # arXiv:2104.04473, section 2.2
        return float(min((virtual - 1) * pp + 2 * (pp - 1 - rank) + 1, virtual * microbatches))
    few = min(microbatches, 4 * pp)
    return float(_flight(layout.schedule, pp, virtual, few)[rank])


def outside(
    device: Device, layout: Layout, stack: Stack, calibration: Calibration, allocated: float
) -> list[Term]:
    """Return what is not the program's: contexts, communicators, what the allocator wastes.

    Measured terms, of the calibration.
    """
    kinds = (stack.name, device.kind)
    context = calibration.find("context_bytes", *kinds)
    axes = sum(n > 1 for n in (layout.pp, layout.dp, layout.cp, layout.tp))
    each = calibration.find("communicator_bytes", *kinds)
    reserve = calibration.find("reserve", *kinds)
    return [
        Term("context", context, "CUDA context and kernels, measured"),
        Term("communicators", each * axes, f"{each:,.0f} B x {axes} axes, measured"),
        Term("allocator", reserve * allocated, f"{reserve:.1%} of what is allocated, measured"),
    ]
