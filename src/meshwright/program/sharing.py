"""What data parallelism sends in one optimizer step: gathers of weights and sums of gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Final, NamedTuple

from meshwright.program.lower import Program
from meshwright.program.messages import Collective, CollectiveKind, Phase
from meshwright.program.shards import Sharding, shard_rank, sums_in_place, unit_of
from meshwright.program.sizes import ELEMENT_BYTES
from meshwright.program.stages import Stage
from meshwright.spec.training import TrainSpec

_FP32: Final = 4  # bytes


class _MessageUnit(NamedTuple):
    """What is gathered or reduced in one message, see `program.shards.unit_of`.

    Elements: `deferred` of parameters whose gradients may come in a backward of their own, `prompt`
    of the others.
    """

    name: str
    deferred: int
    prompt: int


def _units(
    program: Program, stage: Stage, elements: Callable[[Sharding], int], *, in_place: bool
) -> list[_MessageUnit]:
    """Return the units of a stage; `elements` says what a parameter has in the message."""
    sums: dict[str, list[int]] = {}
    for name in program.parameters(stage):
        unit = unit_of(name, in_place=in_place)
        sharding = program.shardings[name]
        # The head's comes with its input's.
        waits = unit.startswith("layers.") and sharding.part.is_product
        sums.setdefault(unit, [0, 0])[0 if waits else 1] += elements(sharding)
    return [_MessageUnit(name, *found) for name, found in sums.items()]


def gathers(
    program: Program, at: Mapping[str, int], stages: Iterable[Stage]
) -> Iterator[Collective]:
    """Yield the all-gathers of ZeRO, arXiv:1910.02054, section 5.

    Stages 1 and 2 gather once and keep the compute copy for all microbatches; stage 3 gathers for
    each forward and each backward.
    """
    layout = program.layout
    if layout.shard_ranks == 1:
        return
    if sums_in_place(layout, program.target):
        yield from _rows_gathered(program, at, stages)
        return
    element = ELEMENT_BYTES[program.train.precision]
    for stage in stages:
        for unit in _units(program, stage, attrgetter("padded_elements"), in_place=False):
            size = (unit.deferred + unit.prompt) * element
            what = "a block" if unit.name.startswith("layers.") else "the rest of the stage"
            reason = f"ZeRO: the weights of {what}"
            for phase, times in _passes(program, layout.zero == 3):
                yield Collective("all_gather", "shard", size, times, phase, "weights", reason)


def _passes(program: Program, is_each: bool) -> tuple[tuple[Phase, int], ...]:
    """Return when weights are gathered and how often: with each pass of a microbatch, or once."""
    each: tuple[tuple[Phase, int], ...] = (
        ("forward", program.microbatches),
        ("backward", program.microbatches),
    )
    return each if is_each else (("step", 1),)


def _rows_gathered(
    program: Program, at: Mapping[str, int], stages: Iterable[Stage]
) -> Iterator[Collective]:
    """Yield the sends and receives of an all-gather whose rows stay where they are.

    Stage 3 gathers blocks alone for each forward and each backward, the rest of a stage once.
    """
    layout, element = program.layout, ELEMENT_BYTES[program.train.precision]
    place, ranks = shard_rank(layout, at), layout.shard_ranks
    counts: Counter[tuple[CollectiveKind, Phase, bool, int]] = Counter()
    for stage in stages:
        for name in program.parameters(stage):
            sharding = program.shardings[name]
            is_block = name.startswith("layers.")
            mine = math.prod(sharding.shape(at["tp"], place))
            each = sharding.rows_each
            full, left = divmod(sharding.tp_shape[0], each)
            for phase, times in _passes(program, layout.zero == 3 and is_block):
                counts["send", phase, is_block, mine] += times * (ranks - 1)
                counts["recv", phase, is_block, each * sharding.row_elements] += times * full
                counts["recv", phase, is_block, left * sharding.row_elements] += times
                counts["recv", phase, is_block, mine] -= times
    for (kind, phase, is_block, size), count in counts.items():
        if size and count:
            what = "a block" if is_block else "the rest of the stage"
            way = "rows to all others" if kind == "send" else "the rows of others"
            reason = f"ZeRO: the weights of {what}, {way}"
            yield Collective(kind, "shard", size * element, count, phase, "weights", reason)


def reductions(
    program: Program, at: Mapping[str, int], stages: Iterable[Stage]
) -> Iterator[Collective]:
    """Yield the sums of gradients over data: reduce-scatters over `shard`, and over `replicate`.

    Replicas meet once, after the last microbatch; where FSDP2 has a backward that is split, after
    each second half, since what the rounds hold differs.
    """
    layout = program.layout
    in_place = sums_in_place(layout, program.target)
    if in_place and layout.shard_ranks > 1:
        yield from _exchanges(program, at, stages)
        return
    element = reduced_bytes(program.train)
    replicas, ranks = layout.replica_ranks, layout.shard_ranks
    each = layout.zero >= 2 and not in_place
    phase = _summed_in(each)
    for stage in stages:
        units = _units(program, stage, attrgetter("padded_elements"), in_place=in_place)
        rounds = list(_rounds(program, at["pp"], stage, each))
        met = _summed_in(sum(meets for *_, meets in rounds) > 1)
        for has_deferred, has_prompt, meets in rounds:
            for unit in units:
                size = element * (has_deferred * unit.deferred + has_prompt * unit.prompt)
                if not size:
                    continue
                if ranks > 1:
                    reason = "ZeRO: sum and cut gradients"
                    yield Collective("reduce_scatter", "shard", size, 1, phase, "gradients", reason)
                if replicas > 1 and meets:
                    reason = "replicas: sum gradients"
                    size //= ranks
                    yield Collective("all_reduce", "replicate", size, 1, met, "gradients", reason)


def _summed_in(each: bool) -> Phase:
    """Return when gradients are summed: with each microbatch's backward, or once."""
    return "backward" if each else "step"


def reduced_bytes(train: TrainSpec) -> int:
    """Return the bytes of an element of the dtype in which gradients travel."""
    widens = train.reduce_dtype == "fp32"
    return _FP32 if widens else ELEMENT_BYTES[train.precision]


def _exchanges(
    program: Program, at: Mapping[str, int], stages: Iterable[Stage]
) -> Iterator[Collective]:
    """Yield how rows of gradients reach the ranks that they belong to, which sum them in fp32.

    What a reduce-scatter is without the sums on the way, arXiv:1910.02054, section 5.
    """
    place, tp_rank = shard_rank(program.layout, at), at["tp"]
    each = program.layout.zero >= 2
    phase = _summed_in(each)

    def own(sharding: Sharding) -> int:
        return math.prod(sharding.shape(tp_rank, place))

    def others(sharding: Sharding) -> int:
        return math.prod(sharding.tp_shape) - own(sharding)

    for stage in stages:
        sent = _units(program, stage, others, in_place=True)
        for has_deferred, has_prompt, _ in _rounds(program, at["pp"], stage, each):
            for unit in sent:
                count = has_deferred * unit.deferred + has_prompt * unit.prompt
                if count:
                    reason = "ZeRO: rows of gradients to the ranks that sum them"
                    size = count * reduced_bytes(program.train)
                    yield Collective("all_to_all", "shard", size, 1, phase, "gradients", reason)
        if program.layout.dp_replicate > 1:
            for unit in _units(program, stage, own, in_place=True):
                size = (unit.deferred + unit.prompt) * _FP32
                if size:
                    reason = "replicas: sum gradients"
                    yield Collective(
                        "all_reduce", "replicate", size, 1, "step", "gradients", reason
                    )


def _rounds(
    program: Program, pp_rank: int, stage: Stage, each: bool
) -> Iterator[tuple[bool, bool, bool]]:
    """Yield the reductions of a stage's gradients: of deferred, of prompt ones, among replicas.

    After each microbatch, as ZeRO 2 and 3 do, else after the last one. A split backward reduces
    with its second half, and then also what later microbatches' first halves have left by then:
    theirs is missing in the reductions after it.
    """
    table = [action for action in program.compute_tables[pp_rank] if action.stage == stage.index]
    last = max(place for place, action in enumerate(table) if action.kind in ("B", "W"))
    has_deferred = has_prompt = False
    for place, action in enumerate(table):
        has_prompt |= action.kind in ("B", "I")
        has_deferred |= action.kind in ("B", "W")
        if action.kind in ("B", "W") and (each or place == last):
            yield has_deferred, has_prompt, action.kind == "W" or place == last
            has_deferred = has_prompt = False
