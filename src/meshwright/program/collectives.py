"""What one rank sends in one optimizer step: each kind of message, its size, how often, and why.

The step is one call of `train.update.gradients`: all microbatches forward and backward, the sums
that complete the gradients, their norm. An axis of one rank sends nothing and is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from meshwright.layout.schedules import SCHEDULES
from meshwright.program.actions import Table
from meshwright.program.lower import Program
from meshwright.program.messages import Beside, Collective
from meshwright.program.operations import Sizes, gathers_again, loss_rows
from meshwright.program.shards import shard_rank
from meshwright.program.sharing import gathers, reductions
from meshwright.program.stages import Stage

_FP32: Final = 4  # bytes
_WIDE: Final = 8  # bytes of fp64 and int64


def collectives(program: Program, rank: int, *, on_cpu: bool = False) -> tuple[Collective, ...]:
    """Return all that a rank sends and receives in one step, by purpose.

    ZeRO sums otherwise where ranks are on CPUs, see `program.shards.sums_in_place`, and the loss
    takes fewer tokens at a time.
    """
    at = program.layout.mesh.coordinates(rank)
    stages = program.held(at["pp"])
    sizes = Sizes.of(program)
    found = [
        *_targets(program),
        *_borders(program, sizes, stages, on_cpu),
        *_context(program, sizes, stages),
        *_transfers(sizes, program.tables[at["pp"]]),
        *gathers(program, at, stages, on_cpu),
        *reductions(program, at, stages, on_cpu),
        *_completion(program, stages, at["tp"], shard_rank(program.layout, at)),
    ]
    if program.layout.world > 1:
        found.append(Collective("all_reduce", "world", _WIDE, 1, "norm: sum the squares"))
    return _summed(found)


def _summed(found: Iterable[Collective]) -> tuple[Collective, ...]:
    """Return the collectives with equal ones joined, in the order of their first."""
    counts: Counter[Collective] = Counter()
    for one in found:
        counts[replace(one, count=0)] += one.count
    return tuple(replace(one, count=count) for one, count in counts.items() if count)


def _targets(program: Program) -> Iterator[Collective]:
    if program.layout.dp * program.layout.cp > 1:
        yield Collective("all_reduce", "data", _WIDE, 1, "loss: count the targets")


def _borders(
    program: Program, sizes: Sizes, stages: Iterable[Stage], on_cpu: bool
) -> Iterator[Collective]:
    """Yield what crosses the borders of tensor parallelism.

    Megatron-LM, arXiv:1909.08053, section 3; with the sequence cut, arXiv:2205.05198, section 4.2.
    """
    layout, count = program.layout, program.microbatches
    if layout.tp == 1:
        return
    whole = sizes.whole_bytes
    for stage in stages:
        passes = len(stage.layers) * count
        if layout.sp:
            yield from _sequence_borders(program, whole, passes)
        else:
            yield from _plain_borders(program, whole, passes)
        if stage.is_first:
            yield from _embedding(layout.sp, whole, count)
        if stage.is_last:
            yield from _head(layout.sp, whole, count)
            yield from _loss(layout.tp, sizes, count, on_cpu)


def _left_again(program: Program) -> int:
    """Return how often a layer's second forward crosses the border out of a part that is cut.

    Once, as it ends with the last product; twice where dropout comes after it. The selective policy
    keeps what came over.
    """
    if program.layout.recompute != "full":
        return 0
    return 2 if program.model.dropout else 1


def _plain_borders(program: Program, whole: int, passes: int) -> Iterator[Collective]:
    def reduce(times: int, reason: str, beside: Beside = "") -> Collective:
        return Collective("all_reduce", "tp", whole, times * passes, reason, beside)

    yield reduce(2, "forward: sum the results of row-parallel products")
    yield reduce(2, "backward: sum the gradients of column-parallel products' inputs", "weights")
    yield reduce(_left_again(program), "recompute: sum the results of row-parallel products")


def _sequence_borders(program: Program, whole: int, passes: int) -> Iterator[Collective]:
    def gather(times: int, reason: str, beside: Beside = "") -> Collective:
        return Collective("all_gather", "tp", whole, times * passes, reason, beside)

    def scatter(times: int, reason: str, beside: Beside = "") -> Collective:
        return Collective("reduce_scatter", "tp", whole, times * passes, reason, beside)

    yield gather(2, "forward: gather the stream before column-parallel products")
    yield scatter(2, "forward: sum and cut the results of row-parallel products")
    yield gather(2, "backward: gather the gradients of row-parallel products' results")
    into = "before column-parallel products"
    yield scatter(2, f"backward: sum and cut the gradients {into}", "weights")
    # Neither does the selective policy keep gathered tensors: they are the largest.
    if gathers_again(program):
        yield gather(2, f"backward: gather the stream again {into}", "inputs")
    else:
        yield gather(2, f"recompute: gather the stream {into}")
    yield scatter(_left_again(program), "recompute: sum and cut the results of row products")


def _embedding(sp: bool, whole: int, count: int) -> Iterator[Collective]:
    if not sp:
        yield Collective("all_reduce", "tp", whole, count, "embedding: sum the ranks' rows")
        return
    yield Collective("reduce_scatter", "tp", whole, count, "embedding: sum and cut the ranks' rows")
    yield Collective("all_gather", "tp", whole, count, "embedding: gather the gradients")


def _head(sp: bool, whole: int, count: int) -> Iterator[Collective]:
    if not sp:
        reason = "head: sum the gradients of its input"
        yield Collective("all_reduce", "tp", whole, count, reason, "weights")
        return
    yield Collective("all_gather", "tp", whole, count, "head: gather the stream")
    reason = "head: sum and cut its input's gradients"
    yield Collective("reduce_scatter", "tp", whole, count, reason, "weights")


def _loss(tp: int, sizes: Sizes, count: int, on_cpu: bool) -> Iterator[Collective]:
    """Yield three numbers a token, for as many tokens as have their logits at a time."""
    each = loss_rows(sizes.tokens, sizes.element, on_cpu=on_cpu)
    for rows, times in ((each, sizes.tokens // each), (sizes.tokens % each, 1)):
        size = 3 * _FP32 * rows * tp
        reason = "loss: largest logits, sums of exponentials, target logits"
        yield Collective("all_gather", "tp", size, count * times * bool(rows), reason)


def _context(program: Program, sizes: Sizes, stages: Iterable[Stage]) -> Iterator[Collective]:
    """Yield what context parallelism sends.

    Ring: arXiv:2310.01889; the keys visit each other rank, and the sums of what those ranks give to
    their gradients, in fp32, follow on the way home. Ulysses: arXiv:2309.14509. A second forward
    sends its part again, with the selective policy too.
    """
    layout = program.layout
    if layout.cp == 1:
        return
    passes = program.microbatches * sum(len(stage.layers) for stage in stages)
    forwards = passes * (1 if layout.recompute == "none" else 2)
    of_keys = 2 * sizes.tokens * sizes.kv_heads * sizes.head_dim
    of_queries = sizes.tokens * sizes.heads * sizes.head_dim
    if layout.cp_kind == "ulysses":
        for numbers, reason in (
            (of_queries + of_keys, "Ulysses: positions of q, k and v for heads"),
            (of_queries, "Ulysses: heads of the result for positions"),
        ):
            yield Collective("all_to_all", "cp", numbers * sizes.element, forwards + passes, reason)
        return
    steps = layout.cp - 1
    for kind in ("send", "recv"):
        way = "to the next rank" if kind == "send" else "from the rank before"
        yield Collective(
            kind, "cp", of_keys * sizes.element, steps * forwards, f"ring: keys and values {way}"
        )
        yield Collective(
            kind,
            "cp",
            of_keys * sizes.element,
            steps * passes,
            f"ring, backward: keys and values {way}",
        )
        yield Collective(
            kind, "cp", of_keys * _FP32, steps * passes, f"ring: the keys' gradients {way}"
        )


def _transfers(sizes: Sizes, table: Table) -> Iterator[Collective]:
    counts = Counter(action.kind for action in table)
    size = sizes.stream_bytes
    yield Collective("send", "pp", size, counts["SEND_F"], "pipeline: output to the next stage")
    yield Collective("recv", "pp", size, counts["RECV_F"], "pipeline: input from the stage before")
    yield Collective("send", "pp", size, counts["SEND_B"], "pipeline: gradient to the stage before")
    yield Collective("recv", "pp", size, counts["RECV_B"], "pipeline: gradient from the next stage")


def _completion(
    program: Program, stages: Iterable[Stage], tp_rank: int, data_rank: int
) -> Iterator[Collective]:
    """Yield the sums that data parallelism does not form: over tp, and of tied copies."""

    def shard(name: str) -> int:
        return _FP32 * math.prod(program.shardings[name].shape(tp_rank, data_rank))

    layout, names = program.layout, [n for stage in stages for n in program.parameters(stage)]
    partial = [name for name in names if program.shardings[name].is_partial]
    if partial:
        size = sum(map(shard, partial))
        yield Collective("all_reduce", "tp", size, 1, "gradients of what sees a part of the tokens")
    is_v = SCHEDULES[layout.schedule].is_v  # both copies on one rank
    if program.model.tie_embeddings and layout.pp > 1 and not is_v and "embed.weight" in names:
        size = shard("embed.weight")
        yield Collective("all_reduce", "ends", size, 1, "gradients of the tied embedding and head")
