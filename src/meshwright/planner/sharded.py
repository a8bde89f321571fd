"""`Shardings`: the ZeRO stages and offloads of a division of the devices, each priced once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import ge

from meshwright.cost.data_messages import UnitSeconds, data_messages, unit_messages
from meshwright.cost.kernels import Kernels
from meshwright.cost.memory import model_states
from meshwright.cost.setting import Setting, held_by
from meshwright.cost.step import optimizer_seconds
from meshwright.cost.work import HeldLayers
from meshwright.layout import Layout
from meshwright.planner.space import (
    OF_SHARDING,
    Pins,
    ZeroSharding,
    obeys,
    offloads,
    shardings,
    with_sharding,
)
from meshwright.spec.training import Offload


@dataclass(frozen=True)
class Choice:
    """A ZeRO stage with its shards and offload, priced for one division of the devices.

    `unit` has the seconds of a microbatch's messages, `states` the bytes of model states on the
    first and the last pipeline rank, `once` the seconds per step for messages and the update on
    ranks with such layers.
    """

    sharding: ZeroSharding
    offload: Offload
    unit: UnitSeconds
    states: tuple[float, float]
    once: dict[HeldLayers, tuple[float, float]] = field(default_factory=dict, compare=False)


class Shardings:
    """The ZeRO choices for a division that no other choice beats in all respects; cached.

    The setting may be replaced by one that differs by its batch.
    """

    def __init__(self, setting: Setting, kernels: Kernels, pins: Pins) -> None:
        self.setting, self.kernels, self.pins = setting, kernels, pins
        self._known: dict[tuple[object, ...], list[Choice]] = {}
        self._least: dict[tuple[object, ...], float] = {}
        self._units: dict[tuple[object, ...], UnitSeconds] = {}
        self._states: dict[tuple[object, ...], float] = {}
        self._once: dict[tuple[object, ...], tuple[float, float]] = {}

    def of(self, one: Layout, offloaded: tuple[Offload, ...]) -> list[Choice]:
        """Return the ZeRO stages of a division of the devices, each with its costs."""
        often = self._often(one) if "params" in offloaded else ()
        key = (one.pp, one.dp_replicate, one.cp, one.tp, one.ep, one.etp, offloaded, often)
        if key not in self._known:
            self._known[key] = _best_somewhere(
                [
                    self._choice(one, layout, sharding, offload)
                    for sharding in shardings(one.dp_replicate, one.cp, one.expert_data)
                    for offload in offloads(sharding.zero, offloaded)
                    for layout in [with_sharding(one, sharding, offload)]
                    if obeys(self.pins, layout, OF_SHARDING)
                ]
            )
        return self._known[key]

    def least_states(self, one: Layout, offloaded: tuple[Offload, ...]) -> float:
        """Return the fewest bytes of model states on the first rank of a division's choices.

        Infinite where it has no choice.
        """
        is_summed = one.microbatches(self.setting.train.batch) > 1
        key = (one.pp, one.dp_replicate, one.cp, one.tp, one.ep, one.etp, offloaded, is_summed)
        if key not in self._least:
            self._least[key] = min(
                (
                    sum(term.bytes for term in model_states(self.setting, layout, held[0]))
                    for sharding in shardings(one.dp_replicate, one.cp, one.expert_data)
                    for offload in offloads(sharding.zero, offloaded)
                    for layout in [with_sharding(one, sharding, offload)]
                    if obeys(self.pins, layout, OF_SHARDING)
                    for held in [held_by(self.setting, layout)]
                ),
                default=math.inf,
            )
        return self._least[key]

    def _choice(
        self, one: Layout, layout: Layout, sharding: ZeroSharding, offload: Offload
    ) -> tuple[tuple[float, ...], Choice]:
        """Return a choice, and before it what it costs in each way."""
        held, key = held_by(self.setting, layout), self._alike(layout)
        first, last = (self._states_of(layout, held[rank], key) for rank in (0, one.pp - 1))
        unit = self._unit(layout)
        choice = Choice(sharding, offload, unit, (first, last))
        sent, update = self.once(one, choice, held[0])
        return (sent + update, *unit.largest, first, last), choice

    def _states_of(self, layout: Layout, held: HeldLayers, key: tuple[object, ...]) -> float:
        """Return the bytes of model states of a rank with such layers; `key` is `_alike`."""
        key = *key, held
        if key not in self._states:
            terms = model_states(self.setting, layout, held)
            self._states[key] = sum(term.bytes for term in terms)
        return self._states[key]

    def _unit(self, layout: Layout) -> UnitSeconds:
        """Return the seconds of a microbatch's messages, which depend on few choices."""
        one = layout
        key = (one.zero, one.shard_ranks, one.tp, one.ep, one.etp, one.offload == "params")
        if key not in self._units:
            self._units[key] = unit_messages(self.setting, self.kernels, one)
        return self._units[key]

    def once(self, one: Layout, choice: Choice, held: HeldLayers) -> tuple[float, float]:
        """Return the seconds per step of a pipeline rank's messages and update."""
        if held not in choice.once:
            layout = with_sharding(one, choice.sharding, choice.offload)
            key = *self._alike(layout), held
            if key not in self._once:
                self._once[key] = (
                    data_messages(self.setting, self.kernels, layout, held),
                    optimizer_seconds(self.setting, self.kernels, layout, held),
                )
            choice.once[held] = self._once[key]
        return choice.once[held]

    def _often(self, layout: Layout) -> tuple[int, int]:
        """Return how often weights on the host are sent, anew for each microbatch, and its size."""
        return layout.microbatches(self.setting.train.batch), layout.microbatch

    def _alike(self, layout: Layout) -> tuple[object, ...]:
        """Return what of a 1F1B layout determines a rank's states, and messages once per step."""
        one = layout
        often = self._often(one) if one.offload == "params" else ()
        zero = one.zero, one.shard_ranks, one.replica_ranks
        return *zero, one.tp, one.ep, one.etp, one.offload, often


def _best_somewhere(found: Sequence[tuple[tuple[float, ...], Choice]]) -> list[Choice]:
    """Return the choices that no other is at least as good as everywhere; of equal ones the first.

    Before each choice stands what it costs, in each way.
    """
    firsts = dict(reversed(found))
    return [
        choice
        for costs, choice in found
        if firsts[costs] is choice
        and not any(all(map(ge, costs, other)) for other in firsts if other != costs)
    ]
