"""Data-parallel messages in one optimizer step: gathers of weights and sums of gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from meshwright.layout import Layout
from meshwright.program.float8 import (
    LARGEST_BYTES,
    float8_weights,
    gathered_element,
    gathers_float8,
)
from meshwright.program.lower import Program
from meshwright.program.messages import Axis, Collective, CollectiveKind, Phase
from meshwright.program.shards import (
    EMBED,
    EXPERTS,
    HEAD,
    Sharding,
    data_rank,
    unit_of,
)
from meshwright.program.sizes import ELEMENT_BYTES
from meshwright.program.stages import Stage
from meshwright.spec.training import TrainSpec

# A gradient of an embedding is a sum by the ids of tokens alone; the loss is made in the backward.
_UNUSED: Final = ((EMBED, "backward"), (HEAD, "forward"))
_OF_REPLICAS: Final = "replicas: sum gradients"


class _MessageUnit(NamedTuple):
    """What is gathered or reduced in one message, see `program.shards.unit_of`.

    `deferred` are the bytes of parameters whose gradients a split backward may compute later,
    `prompt` those of the others. `axes` are the ranks that share it, and those that hold copies.
    """

    name: str
    deferred: int
    prompt: int
    axes: _Axes

    def of(self, has_deferred: bool, has_prompt: bool) -> int:
        """Return the bytes of one reduction, with the deferred parameters, the prompt ones, or
        both."""
        return has_deferred * self.deferred + has_prompt * self.prompt


class _Axes(NamedTuple):
    """The axis over which ZeRO shards some weights, and the axis of ranks with the same shards."""

    shard: Axis
    shards: int
    replicate: Axis
    replicas: int


def _axes(layout: Layout, sharding: Sharding) -> _Axes:
    if sharding.ep > 1:
        ranks = sharding.shard_ranks, layout.expert_replica_ranks
        return _Axes("expert_shard", ranks[0], "expert_replicate", ranks[1])
    return _Axes("shard", sharding.shard_ranks, "replicate", layout.replica_ranks)


def unit_in(program: Program, name: str) -> str:
    """Return the name of a parameter's unit in a program.

    FSDP2 has separate units for embedding and head, because only a forward or only a backward uses
    their weights; tied ones belong to the rest of the stage.
    """
    layout, apart = program.layout, [EMBED]
    if program.target.uses_fsdp2(layout):
        apart = [] if program.model.tie_embeddings else [EMBED, HEAD]
    return unit_of(name, ep=layout.ep, apart=apart)


def _is_cut(sharding: Sharding) -> bool:
    return sharding.shard_ranks > 1


def _is_trained(sharding: Sharding) -> bool:
    return sharding.part.trained


def _units(
    program: Program,
    stage: Stage,
    size: Callable[[Sharding], int],
    which: Callable[[Sharding], bool],
) -> list[_MessageUnit]:
    """Return the units of a stage with the parameters that `which` selects; `size` gives a
    parameter's bytes."""
    sums: dict[str, list[int]] = {}
    axes: dict[str, _Axes] = {}
    for name in program.parameters(stage):
        unit = unit_in(program, name)
        sharding = program.shardings[name]
        if not which(sharding):
            continue
        # The head's comes with its input's, and adapters' with those of their layers' inputs.
        waits = unit.startswith("layers.") and sharding.part.is_matmul
        waits = waits and not sharding.part.is_adapter
        sums.setdefault(unit, [0, 0])[0 if waits else 1] += size(sharding)
        axes[unit] = _axes(program.layout, sharding)
    return [_MessageUnit(name, waits, comes, axes[name]) for name, (waits, comes) in sums.items()]


def gathers(
    program: Program, coordinates: Mapping[str, int], stages: Iterable[Stage]
) -> Iterator[Collective]:
    """Yield the all-gathers of ZeRO, arXiv:1910.02054, section 5.

    Stages 1 and 2 gather once and keep the compute copy for all microbatches; stage 3 gathers for
    each forward and each backward.
    """
    layout, train = program.layout, program.train
    if layout.shard_ranks == 1:
        return
    if not program.target.uses_fsdp2(layout):
        yield from _rows_gathered(program, coordinates, stages)
        return
    rounded = gathers_float8(train, layout, program.target)
    if rounded:
        yield from _scales(program, stages)
    element = ELEMENT_BYTES[train.precision]

    def padded(sharding: Sharding) -> int:
        return sharding.padded_elements * gathered_element(sharding.part, element, rounded)

    for stage in stages:
        for unit in _units(program, stage, padded, _is_cut):
            size = unit.deferred + unit.prompt
            reason = f"ZeRO: the weights of {_what(unit.name)}"
            for phase, times in _passes(program, layout.zero == 3):
                if (unit.name, phase) in _UNUSED:
                    continue
                axis = unit.axes.shard
                yield Collective("all_gather", axis, size, times, phase, "weights", reason)


def _scales(program: Program, stages: Iterable[Stage]) -> Iterator[Collective]:
    """Yield the all-reduce of the largest values of weights that are gathered in float8."""
    kinds = (program.model.layer(layer) for stage in stages for layer in stage.layers)
    size = LARGEST_BYTES * sum(float8_weights(program.model, kind) for kind in kinds)
    reason = "float8: the largest value of each weight"
    yield Collective("all_reduce", "shard", size, 1, "step", "scales", reason)


def _what(unit: str) -> str:
    """Return a unit's name in words."""
    if unit.endswith(EXPERTS):
        return "a block's experts"
    if unit in (EMBED, HEAD):
        return "the embedding" if unit == EMBED else "the head"
    return "a block" if unit.startswith("layers.") else "the rest of the stage"


def _passes(program: Program, is_each: bool) -> tuple[tuple[Phase, int], ...]:
    """Return the phases in which weights are gathered, with counts: in each pass of a microbatch,
    or once."""
    per_pass: tuple[tuple[Phase, int], ...] = (
        ("forward", program.microbatches),
        ("backward", program.microbatches),
    )
    return per_pass if is_each else (("step", 1),)


def _rows_gathered(
    program: Program, coordinates: Mapping[str, int], stages: Iterable[Stage]
) -> Iterator[Collective]:
    """Yield the sends and receives of the all-gather between CPU ranks, which receives rows in
    place.

    Stage 3 gathers blocks for each forward and each backward, the rest of a stage once.
    """
    layout, element = program.layout, ELEMENT_BYTES[program.train.precision]
    place = data_rank(layout, coordinates)
    counts: Counter[tuple[CollectiveKind, Axis, Phase, str, int]] = Counter()
    for stage in stages:
        for name in program.parameters(stage):
            sharding = program.shardings[name]
            axis, ranks = _axes(layout, sharding)[:2]
            if ranks == 1:
                continue
            unit = _what(unit_in(program, name))
            shard_elements = math.prod(sharding.shape(coordinates["tp"], place))
            rows_per_rank = sharding.rows_each
            full, left = divmod(sharding.tp_shape[0], rows_per_rank)
            is_each = layout.zero == 3 and name.startswith("layers.")
            for phase, times in _passes(program, is_each):
                counts["send", axis, phase, unit, shard_elements] += times * (ranks - 1)
                counts["recv", axis, phase, unit, rows_per_rank * sharding.row_elements] += (
                    times * full
                )
                counts["recv", axis, phase, unit, left * sharding.row_elements] += times
                counts["recv", axis, phase, unit, shard_elements] -= times
    for (kind, axis, phase, unit, size), count in counts.items():
        if size and count:
            way = "rows to all others" if kind == "send" else "the rows of others"
            reason = f"ZeRO: the weights of {unit}, {way}"
            yield Collective(kind, axis, size * element, count, phase, "weights", reason)


def reductions(
    program: Program, coordinates: Mapping[str, int], stages: Iterable[Stage]
) -> Iterator[Collective]:
    """Yield the reductions of gradients over data ranks: over `shard`, and over `replicate`.

    Replicas are reduced once, after the last microbatch. FSDP2 with a split backward reduces them
    after each second half, because the parts differ between rounds.
    """
    layout = program.layout
    by_fsdp2 = program.target.uses_fsdp2(layout)
    if not by_fsdp2 and layout.shard_ranks > 1:
        yield from _exchanges(program, coordinates, stages)
    element = reduced_bytes(program.train)
    each_microbatch = layout.zero >= 2 and by_fsdp2
    phase = _summed_in(each_microbatch)

    def padded(sharding: Sharding) -> int:
        return element * sharding.padded_elements

    for stage in stages:
        units = _units(program, stage, padded, _is_trained)
        rounds = list(_rounds(program, coordinates["pp"], stage, each_microbatch))
        met = _summed_in(sum(meets for *_, meets in rounds) > 1)
        for *comes, meets in rounds:
            for unit in units:
                axes = unit.axes
                size = unit.of(*comes)
                if not size or (not by_fsdp2 and axes.shards > 1):
                    continue
                if axes.shards > 1:
                    reason = "ZeRO: sum and cut gradients"
                    yield Collective(
                        "reduce_scatter", axes.shard, size, 1, phase, "gradients", reason
                    )
                if axes.replicas > 1 and meets:
                    size //= axes.shards
                    yield Collective(
                        "all_reduce", axes.replicate, size, 1, met, "gradients", _OF_REPLICAS
                    )


def _summed_in(each_microbatch: bool) -> Phase:
    """Return the phase of gradient reductions: each microbatch's backward, or once per step."""
    return "backward" if each_microbatch else "step"


def reduced_bytes(train: TrainSpec) -> int:
    """Return the bytes per element of gradients in a reduction."""
    return ELEMENT_BYTES[train.reduced_dtype]


def _exchanges(
    program: Program, coordinates: Mapping[str, int], stages: Iterable[Stage]
) -> Iterator[Collective]:
    """Yield the all-to-alls that bring rows of gradients to the CPU ranks that own and sum them in
    fp32.

    They replace a reduce-scatter, without sums on the way: arXiv:1910.02054, section 5.
    """
    place, tp_rank = data_rank(program.layout, coordinates), coordinates["tp"]
    each_microbatch = program.layout.zero >= 2
    phase, element = _summed_in(each_microbatch), reduced_bytes(program.train)
    gradient = ELEMENT_BYTES[program.train.gradient_dtype]

    def own(sharding: Sharding) -> int:
        return element * math.prod(sharding.shape(tp_rank, place))

    def whole(sharding: Sharding) -> int:
        return element * math.prod(sharding.tp_shape)

    def summed(sharding: Sharding) -> int:
        return gradient * math.prod(sharding.shape(tp_rank, place))

    for stage in stages:
        units, shards = (_units(program, stage, size, _is_trained) for size in (whole, own))
        for *comes, _ in _rounds(program, coordinates["pp"], stage, each_microbatch):
            for unit, shard in zip(units, shards, strict=True):
                size, axis = unit.of(*comes), unit.axes.shard
                # A rank that has all rows of few experts sends none, and takes part.
                if size and unit.axes.shards > 1:
                    reason = "ZeRO: rows of gradients to the ranks that sum them"
                    size -= shard.of(*comes)
                    yield Collective("all_to_all", axis, size, 1, phase, "gradients", reason)
        for unit in _units(program, stage, summed, _is_trained):
            size, axes = unit.deferred + unit.prompt, unit.axes
            if size and axes.shards > 1 and axes.replicas > 1:
                yield Collective(
                    "all_reduce", axes.replicate, size, 1, "step", "gradients", _OF_REPLICAS
                )


def _rounds(
    program: Program, pp_rank: int, stage: Stage, each_microbatch: bool
) -> Iterator[tuple[bool, bool, bool]]:
    """Yield the reductions of a stage: whether each has deferred gradients, prompt ones, and
    replicas.

    With ZeRO 2 and 3 there is one after each microbatch, else one after the last. A split backward
    reduces with its second half, which includes what first halves of later microbatches have
    computed by then.
    """
    table = [action for action in program.compute_tables[pp_rank] if action.stage == stage.index]
    last = max(place for place, action in enumerate(table) if action.kind in ("B", "W"))
    has_deferred = has_prompt = False
    for place, action in enumerate(table):
        has_prompt |= action.kind in ("B", "I")
        has_deferred |= action.kind in ("B", "W")
        if action.kind in ("B", "W") and (each_microbatch or place == last):
            yield has_deferred, has_prompt, action.kind == "W" or place == last
            has_deferred = has_prompt = False
