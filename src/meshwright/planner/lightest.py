"""The layout that needs the least memory: whether anything fits, without a full ranking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from meshwright.cost.memory import activations, model_states, outside
from meshwright.cost.pipeline import in_flight
from meshwright.cost.setting import Setting, held_by, may_hold_most
from meshwright.layout import Layout
from meshwright.layout.four_bits import four_bit_rule
from meshwright.planner.space import cores, dominated, schedules
from meshwright.spec.training import Offload, Recompute, TrainSpec


class Light(NamedTuple):
    """A layout and the bytes of its largest rank; sorts by bytes."""

    bytes: float
    layout: Layout


def divisions(setting: Setting, devices: int) -> Iterator[Layout]:
    """Yield the legal divisions of the devices over the axes, one sequence per microbatch."""
    one_each = setting.train.model_copy(update={"batch": devices})
    for core in cores(setting.model, one_each, devices):
        if core.layout.microbatch == 1 and core.layout.recompute == "none":
            yield core.layout


def lightest_of(
    setting: Setting, one: Layout, microbatches: int, offload: Offload = "none"
) -> Light | None:
    """Return the layout of a division with the least memory.

    Keeps its microbatch and recomputation. Tries each ZeRO stage over all data ranks, with the
    schedule that holds the fewest activations. None where no schedule allows so many microbatches.
    """
    layers = setting.model.n_layers
    legal = [s for s in schedules(one.pp, layers, microbatches) if not dominated(s, layers, one.pp)]
    if not legal:
        return None

    def holds(name: str, virtual: int) -> float:
        changed = one.model_copy(update={"schedule": name, "virtual_stages": virtual})
        return in_flight(changed, 0, microbatches) / virtual

    schedule = min(legal, key=lambda choice: holds(*choice))
    one = one.model_copy(update={"schedule": schedule.name, "virtual_stages": schedule.virtual})
    setting = with_train(setting, batch=microbatches * one.dp * one.microbatch)
    held, ends = held_by(setting, one), may_hold_most(setting, one)
    kept = [activations(setting, one, rank) for rank in ends]
    light = None
    for layout in _sharded(one, offload):
        if four_bit_rule(setting.model, layout):
            continue
        needed = 0.0
        for rank, terms in zip(ends, kept, strict=True):
            states = model_states(setting, layout, held[rank])
            size = sum(term.bytes for term in states + terms)
            device, own = setting.cluster.device, setting.calibration
            beside = outside(device, layout, setting.system, own, size)
            needed = max(needed, size + sum(term.bytes for term in beside))
        if light is None or needed < light.bytes:
            light = Light(needed, layout)
    return light


def _sharded(one: Layout, offload: Offload) -> Iterator[Layout]:
    """Yield a division with each ZeRO stage over all of its data ranks."""
    if offload != "params":
        yield one.model_copy(update={"offload": offload})
    if one.dp * one.cp > 1:
        shards = {"dp_shard": one.dp, "dp_replicate": 1, "offload": offload}
        for zero in (1, 2, 3):
            yield one.model_copy(update={**shards, "zero": zero})


def lightest(
    setting: Setting, devices: int, recompute: Recompute = "full", offload: Offload = "none"
) -> Light | None:
    """Return the layout of so many devices with the least memory; None if none is legal."""
    found = [
        light
        for one in divisions(setting, devices)
        if (light := _of_batch(setting, one, recompute, offload)) is not None
    ]
    return min(found, key=lambda light: (light.bytes, light.layout.label), default=None)


def _of_batch(
    setting: Setting, one: Layout, recompute: Recompute, offload: Offload
) -> Light | None:
    """Return the layout of a division with the least memory for the setting's batch, if any."""
    if setting.train.batch % one.dp:
        return None
    one = one.model_copy(update={"recompute": recompute})
    return lightest_of(setting, one, setting.train.batch // one.dp, offload)


class Lengths:
    """Which sequence lengths fit in `limit` bytes on each of so many devices, without offload.

    A division that does not fit is not tried for longer sequences, and the last that did comes
    first.
    """

    def __init__(self, setting: Setting, devices: int, limit: float) -> None:
        self._setting, self._devices, self._limit = setting, devices, limit
        self._too_long: dict[Layout, int] = {}
        self._last: Layout | None = None

    def fit(self, length: int) -> bool:
        """Return whether any layout fits with sequences of so many tokens."""
        own = with_train(self._setting, seq_len=length)
        every = [
            one
            for one in divisions(own, self._devices)
            if self._too_long.get(one, length + 1) > length
        ]
        for one in sorted(every, key=lambda one: one != self._last):
            light = _of_batch(own, one, "full", "none")
            if light is not None and light.bytes <= self._limit:
                self._last = one
                return True
            self._too_long[one] = length
        return False


def with_train(setting: Setting, **changes: int) -> Setting:
    """Return the setting with another batch size or sequence length."""
    train: TrainSpec = setting.train.model_copy(update=changes)
    calibration = setting.calibration.of(setting.model, train.seq_len)
    return replace(setting, train=train, calibration=calibration)
