"""`Shardings`: the ZeRO stages and offloads of a division of the devices, each priced once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import ge

from meshwright.cost.data_messages import UnitSeconds, data_messages, unit_messages
from meshwright.cost.inputs import CostInputs, layers_of_ranks
from meshwright.cost.kernels import Kernels
from meshwright.cost.memory import model_states
from meshwright.cost.step import optimizer_seconds
from meshwright.cost.work import RankLayers
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
    once: dict[RankLayers, tuple[float, float]] = field(default_factory=dict, compare=False)


class Shardings:
    """The ZeRO choices for a division that no other choice beats in all respects; cached.

    The setting may be replaced by one that differs by its batch.
    """

    def __init__(self, setting: CostInputs, kernels: Kernels, pins: Pins) -> None:
        self.setting, self.kernels, self.pins = setting, kernels, pins
        self._known: dict[tuple[object, ...], list[Choice]] = {}
        self._least: dict[tuple[object, ...], float] = {}
        self._units: dict[tuple[object, ...], UnitSeconds] = {}
        self._states: dict[tuple[object, ...], float] = {}
        self._once: dict[tuple[object, ...], tuple[float, float]] = {}

    def of(self, division: Layout, offloaded: tuple[Offload, ...]) -> list[Choice]:
        """Return the ZeRO stages of a division of the devices, each with its costs."""
        often = self._often(division) if "params" in offloaded else ()
        key = (
            division.pp,
            division.dp_replicate,
            division.cp,
            division.tp,
            division.ep,
            division.etp,
            offloaded,
            often,
        )
        if key not in self._known:
            self._known[key] = _best_somewhere(
                [
                    self._choice(division, layout, sharding, offload)
                    for sharding in shardings(
                        division.dp_replicate, division.cp, division.expert_data
                    )
                    for offload in offloads(sharding.zero, offloaded)
                    for layout in [with_sharding(division, sharding, offload)]
                    if obeys(self.pins, layout, OF_SHARDING)
                ]
            )
        return self._known[key]

    def least_states(self, division: Layout, offloaded: tuple[Offload, ...]) -> float:
        """Return the fewest bytes of model states on the first rank of a division's choices.

        Infinite where it has no choice.
        """
        is_summed = division.microbatches(self.setting.train.batch) > 1
        key = (
            division.pp,
            division.dp_replicate,
            division.cp,
            division.tp,
            division.ep,
            division.etp,
            offloaded,
            is_summed,
        )
        if key not in self._least:
            self._least[key] = min(
                (
                    sum(term.bytes for term in model_states(self.setting, layout, held_layers[0]))
                    for sharding in shardings(
                        division.dp_replicate, division.cp, division.expert_data
                    )
                    for offload in offloads(sharding.zero, offloaded)
                    for layout in [with_sharding(division, sharding, offload)]
                    if obeys(self.pins, layout, OF_SHARDING)
                    for held_layers in [layers_of_ranks(self.setting, layout)]
                ),
                default=math.inf,
            )
        return self._least[key]

    def _choice(
        self, division: Layout, layout: Layout, sharding: ZeroSharding, offload: Offload
    ) -> tuple[tuple[float, ...], Choice]:
        """Return a tuple of costs, one for each way in which choices differ, and the choice."""
        held_layers, key = layers_of_ranks(self.setting, layout), self._alike(layout)
        first, last = (
            self._states_of(layout, held_layers[rank], key) for rank in (0, division.pp - 1)
        )
        unit = self._unit(layout)
        choice = Choice(sharding, offload, unit, (first, last))
        sent, update = self.once(division, choice, held_layers[0])
        return (sent + update, *unit.largest, first, last), choice

    def _states_of(self, layout: Layout, held_layers: RankLayers, key: tuple[object, ...]) -> float:
        """Return the bytes of model states of a rank with such layers; `key` is `_alike`."""
        key = *key, held_layers
        if key not in self._states:
            terms = model_states(self.setting, layout, held_layers)
            self._states[key] = sum(term.bytes for term in terms)
        return self._states[key]

    def _unit(self, layout: Layout) -> UnitSeconds:
        """Return the seconds of a microbatch's messages, which depend on few choices."""
        key = (
            layout.zero,
            layout.shard_ranks,
            layout.tp,
            layout.ep,
            layout.etp,
            layout.offload == "params",
        )
        if key not in self._units:
            self._units[key] = unit_messages(self.setting, self.kernels, layout)
        return self._units[key]

    def once(
        self, division: Layout, choice: Choice, held_layers: RankLayers
    ) -> tuple[float, float]:
        """Return the seconds per step of a pipeline rank's messages and update."""
        if held_layers not in choice.once:
            layout = with_sharding(division, choice.sharding, choice.offload)
            key = *self._alike(layout), held_layers
            if key not in self._once:
                self._once[key] = (
                    data_messages(self.setting, self.kernels, layout, held_layers),
                    optimizer_seconds(self.setting, self.kernels, layout, held_layers),
                )
            choice.once[held_layers] = self._once[key]
        return choice.once[held_layers]

    def _often(self, layout: Layout) -> tuple[int, int]:
        """Return how often weights on the host are sent, anew for each microbatch, and its size."""
        return layout.microbatches(self.setting.train.batch), layout.microbatch

    def _alike(self, layout: Layout) -> tuple[object, ...]:
        """Return the cache key of a rank's states, and of its messages once per step."""
        often = self._often(layout) if layout.offload == "params" else ()
        zero = layout.zero, layout.shard_ranks, layout.replica_ranks
        return *zero, layout.tp, layout.ep, layout.etp, layout.offload, often


def _best_somewhere(candidates: Sequence[tuple[tuple[float, ...], Choice]]) -> list[Choice]:
    """Return the choices that no other one beats or equals in every cost; of equal ones the first.

    `candidates` are pairs of a tuple of costs and a choice.
    """
    firsts = dict(reversed(candidates))
    return [
        choice
        for costs, choice in candidates
        if firsts[costs] is choice
        and not any(
            all(map(ge, costs, other_costs)) for other_costs in firsts if other_costs != costs
        )
    ]
