"""The layout that needs the least memory: whether anything fits, without a full ranking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from meshwright.cost.inputs import CostInputs, layers_of_ranks, may_hold_most
from meshwright.cost.memory import activations, kept_of, model_states, outside
from meshwright.layout import Layout
from meshwright.layout.rules import nf4_rule
from meshwright.planner import space
from meshwright.planner.space import Schedule, dominated, schedules, with_schedule
from meshwright.spec.training import Offload, Recompute, TrainSpec


class Light(NamedTuple):
    """A layout and the bytes of its rank with the most memory; sorts by bytes."""

    bytes: float
    layout: Layout


def divisions(setting: CostInputs, devices: int) -> Iterator[Layout]:
    """Yield a layout for each legal set of parallel degrees on the devices, with microbatch 1.

    They have no recomputation and no ZeRO; the batch is one sequence per device.
    """
    one_each = setting.train.model_copy(update={"batch": devices})
    for division in space.divisions(setting.model, one_each, devices):
        yield division.layout


def lightest_of(
    setting: CostInputs, division: Layout, microbatches: int, offload: Offload = "none"
) -> Light | None:
    """Return the layout with the least memory among those with the parallel degrees of `division`.

    Tries each ZeRO stage over all data-parallel ranks, with the schedule whose first rank holds the
    fewest bytes of activations; microbatch and recomputation stay. None if no schedule is legal for
    `microbatches`, or no ZeRO stage with this offload.
    """
    layers, is_even = setting.model.n_layers, setting.system.even_stages
    legal = [
        s
        for s in schedules(division.pp, layers, microbatches)
        if not dominated(s, layers, division.pp, microbatches, is_even=is_even)
    ]
    if not legal:
        return None

    setting = with_train(setting, batch=microbatches * division.dp * division.microbatch)
    kept_bytes = kept_of(setting, division)

    def holds(schedule: Schedule) -> float:
        terms = activations(setting, with_schedule(division, schedule), 0, kept_bytes)
        return sum(term.bytes for term in terms)

    division = with_schedule(division, min(legal, key=holds))
    held_layers, ends = layers_of_ranks(setting, division), may_hold_most(setting, division)
    activation_terms = [activations(setting, division, rank, kept_bytes) for rank in ends]
    light = None
    for layout in _sharded(division, offload):
        if nf4_rule(setting.model, layout):
            continue
        needed = 0.0
        for rank, terms in zip(ends, activation_terms, strict=True):
            states = model_states(setting, layout, held_layers[rank])
            byte_count = sum(term.bytes for term in states + terms)
            device, calibration = setting.cluster.device, setting.calibration
            outside_terms = outside(device, layout, setting.system, calibration, byte_count)
            needed = max(needed, byte_count + sum(term.bytes for term in outside_terms))
        if light is None or needed < light.bytes:
            light = Light(needed, layout)
    return light


def _sharded(division: Layout, offload: Offload) -> Iterator[Layout]:
    """Yield `division` with the offload, without ZeRO and with each ZeRO stage over all data
    ranks."""
    if offload != "params":
        yield division.model_copy(update={"offload": offload})
    if division.dp * division.cp > 1:
        shards = {"dp_shard": division.dp, "dp_replicate": 1, "offload": offload}
        for zero in (1, 2, 3):
            yield division.model_copy(update={**shards, "zero": zero})


def lightest(
    setting: CostInputs, devices: int, recompute: Recompute = "full", offload: Offload = "none"
) -> Light | None:
    """Return the layout of `devices` ranks with the least memory; None if none is legal.

    Every layout has a microbatch of one sequence, and this recomputation and offload.
    """
    candidates = [
        light
        for division in divisions(setting, devices)
        if (light := _of_batch(setting, division, recompute, offload)) is not None
    ]
    return min(candidates, key=lambda light: (light.bytes, light.layout.label), default=None)


def _of_batch(
    setting: CostInputs, division: Layout, recompute: Recompute, offload: Offload
) -> Light | None:
    """Return `lightest_of` a division for the global batch of the cost inputs.

    None if the data-parallel ranks do not divide the batch, or if `lightest_of` finds none.
    """
    if setting.train.batch % division.dp:
        return None
    division = division.model_copy(update={"recompute": recompute})
    return lightest_of(setting, division, setting.train.batch // division.dp, offload)


class Lengths:
    """Tests which sequence lengths fit in `limit` bytes per device, with full recomputation.

    It caches results between lengths: a division of the devices that did not fit is not tried for
    longer sequences, and the last one that fitted is tried first. Nothing is offloaded.
    """

    def __init__(self, setting: CostInputs, devices: int, limit: float) -> None:
        self._setting, self._devices, self._limit = setting, devices, limit
        self._too_long: dict[Layout, int] = {}
        self._last: Layout | None = None

    def fit(self, length: int) -> bool:
        """Return whether any layout fits with sequences of `length` tokens."""
        setting = with_train(self._setting, seq_len=length)
        candidates = [
            division
            for division in divisions(setting, self._devices)
            if self._too_long.get(division, length + 1) > length
        ]
        for division in sorted(candidates, key=lambda division: division != self._last):
            light = _of_batch(setting, division, "full", "none")
            if light is not None and light.bytes <= self._limit:
                self._last = division
                return True
            self._too_long[division] = length
        return False


def with_train(setting: CostInputs, **changes: int) -> CostInputs:
    """Return the cost inputs with other `train` keys (`batch`, `seq_len`), recalibrated for the
    length."""
    train: TrainSpec = setting.train.model_copy(update=changes)
    calibration = setting.calibration.of(setting.model, train.seq_len)
    return replace(setting, train=train, calibration=calibration)
