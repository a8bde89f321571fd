"""Parts of the price of a layout, computed once per search and shared by many layouts.

`Prices` has the parts that all batch sizes share, `Shardings` the ZeRO stages and offloads for
given parallel degrees. `Pace` has the seconds of a core's microbatches in a pipeline schedule,
which do not depend on the ZeRO stage. `Fits` says whether layouts fit: by an estimate during a
search, and exactly at its end. A core is a layout without schedule, ZeRO stage and offload, see
`space.Core`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import ge, mul
from typing import Final

from meshwright.cost.data_messages import UnitSeconds, Waits, data_messages, unit_messages
from meshwright.cost.host import copy_waits
from meshwright.cost.inputs import CostInputs, layers_of_ranks, stages_of, work_of
from meshwright.cost.kernels import Kernels
from meshwright.cost.memory import KeptBytes, kept_of, model_states
from meshwright.cost.microbatch import MicrobatchTimes, TimesOfParts
from meshwright.cost.pipeline import closed_form, least_in_flight
from meshwright.cost.price import (
    Prediction,
    RankMemory,
    brief,
    price,
    worst_estimate,
    worst_memory,
)
from meshwright.cost.step import host_seconds, optimizer_seconds, transfer_seconds
from meshwright.cost.sums import sums_of
from meshwright.cost.work import RankLayers
from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES
from meshwright.planner.space import (
    OF_SCHEDULE,
    OF_SHARDING,
    Core,
    Division,
    Pins,
    Schedule,
    ZeroSharding,
    as_fixed,
    dominated,
    most_sequences,
    obeys,
    offloads,
    schedules,
    shardings,
    with_schedule,
    with_sharding,
)
from meshwright.spec.training import Offload

# Below this share of the limit a closed form, some percent off, is not looked into.
_SURE: Final = 0.9

# A bound that is computed in another order than what it bounds is lowered by more than rounding.
_ROUNDED: Final = 1 - 1e-9

# Share of the time that each further word of a layout's label, or stage, has to earn. Predictions
# are a few percent off, so of layouts that are about as fast the simplest is the one to run.
_WORD = 0.002


def preference(prediction: Prediction) -> float:
    """Return the value by which layouts are ranked, lowest first: step time plus 0.2% per
    complexity.

    Each word of the layout's label, and each pipeline stage per rank after the first, counts as
    one.
    """
    layout = prediction.layout
    effort = len(layout.label.split()) + layout.virtual_stages - 1
    return prediction.time.total * (1 + _WORD * effort)


class Fits:
    """Caches the memory and price of layouts; `limit` is the bytes that a device may use."""

    def __init__(self, setting: CostInputs, limit: float) -> None:
        self.setting, self.limit = setting, limit
        self._estimates: dict[Layout, RankMemory] = {}
        self._exact: dict[Layout, RankMemory] = {}
        self._timed: dict[Layout, Prediction] = {}

    def estimate(self, layout: Layout, kept_bytes: KeptBytes | None = None) -> RankMemory:
        """Return the memory of a layout's largest rank by a closed form; exact if it is already
        known.

        An estimate close to the limit is refined. `kept_bytes` is the layout's `kept_of`, if the
        caller has it.
        """
        if layout in self._exact:
            return self._exact[layout]
        if layout not in self._estimates:
            memory = worst_estimate(self.setting, layout, kept_bytes)
            if _SURE * self.limit < memory.total <= self.limit:
                memory = brief(self.setting, layout, memory.rank)
            self._estimates[layout] = memory
        return self._estimates[layout]

    def timed(self, layout: Layout) -> Prediction:
        """Return the predicted price of a layout, with its memory only estimated."""
        if layout not in self._timed:
            memory = self.estimate(layout)
            self._timed[layout] = price(self.setting, layout, worst=memory)
        return self._timed[layout]

    def priced(self, timed: Prediction) -> Prediction:
        """Return the prediction of `timed` with exact memory; later estimates of the layout are
        exact too."""
        layout = timed.layout
        if layout not in self._exact:
            self._exact[layout] = worst_memory(self.setting, layout)
        return replace(timed, memory=self._exact[layout])


@dataclass(frozen=True)
class Choice:
    """A ZeRO stage with its number of shards and an offload, priced for given parallel degrees.

    `unit` has the seconds of the gathers and reductions of a microbatch, `states` the bytes of
    model states on the first and the last pipeline rank. `once` caches, by the layers of a rank,
    the seconds per step of data-parallel messages and of the update.
    """

    sharding: ZeroSharding
    offload: Offload
    unit: UnitSeconds
    states: tuple[float, float]
    once: dict[RankLayers, tuple[float, float]] = field(default_factory=dict, compare=False)


class Shardings:
    """Caches the ZeRO stages and offloads worth considering for given parallel degrees.

    These are the ones that no other choice beats or equals in every cost. `setting` may be replaced
    by one with another batch.
    """

    def __init__(self, setting: CostInputs, kernels: Kernels, pins: Pins) -> None:
        self.setting, self.kernels, self.pins = setting, kernels, pins
        self._known: dict[tuple[object, ...], list[Choice]] = {}
        self._priced: dict[tuple[object, ...], tuple[tuple[float, ...], Choice]] = {}
        self._least: dict[tuple[object, ...], float] = {}
        self._units: dict[tuple[object, ...], UnitSeconds] = {}
        self._states: dict[tuple[object, ...], float] = {}
        self._once: dict[tuple[object, ...], tuple[float, float]] = {}

    def of(self, division: Layout, offloaded: tuple[Offload, ...]) -> list[Choice]:
        """Return the ZeRO stages and offloads worth considering with the degrees of `division`,
        priced.

        `offloaded` are the values of `layout.offload` to try.
        """
        often = self._often(division) if "params" in offloaded else ()
        degrees = *_degrees(division), self._is_summed(division)
        key = *degrees, offloaded, often
        if key not in self._known:
            self._known[key] = _best_somewhere(
                [
                    self._choice(division, sharding, offload, degrees)
                    for sharding in shardings(
                        division.dp_replicate, division.cp, division.expert_data
                    )
                    for offload in offloads(sharding.zero, offloaded)
                    if self._obeys(division, sharding, offload)
                ]
            )
        return self._known[key]

    def least_states(
        self, division: Layout, held_layers: RankLayers, offloaded: tuple[Offload, ...]
    ) -> float:
        """Return the fewest bytes of model states on a rank with these layers, over all ZeRO
        stages.

        `offloaded` are the values of `layout.offload` to try. Infinite if no choice is legal.
        """
        key = (*_degrees(division), held_layers, offloaded, self._is_summed(division))
        if key not in self._least:
            self._least[key] = min(
                (
                    self._states_of(layout, held_layers, self._alike(layout))
                    for sharding in shardings(
                        division.dp_replicate, division.cp, division.expert_data
                    )
                    for offload in offloads(sharding.zero, offloaded)
                    if self._obeys(division, sharding, offload)
                    for layout in [with_sharding(division, sharding, offload)]
                ),
                default=math.inf,
            )
        return self._least[key]

    def _obeys(self, division: Layout, sharding: ZeroSharding, offload: Offload) -> bool:
        if not self.pins:
            return True
        return obeys(self.pins, with_sharding(division, sharding, offload), OF_SHARDING)

    def _choice(
        self,
        division: Layout,
        sharding: ZeroSharding,
        offload: Offload,
        degrees: tuple[object, ...],
    ) -> tuple[tuple[float, ...], Choice]:
        """Return the costs by which choices are compared, and the choice; cached.

        The costs are seconds per step, the largest messages of a microbatch, and bytes of model
        states on the first and the last pipeline rank. `degrees` are those that they depend on.
        """
        # Weights on the host are copied for each microbatch.
        often = self._often(division) if offload == "params" else ()
        known = (*degrees, sharding, offload, often)
        if known not in self._priced:
            layout = with_sharding(division, sharding, offload)
            held_layers, key = layers_of_ranks(self.setting, layout), self._alike(layout)
            first, last = (
                self._states_of(layout, held_layers[rank], key) for rank in (0, division.pp - 1)
            )
            unit = self._unit(layout)
            choice = Choice(sharding, offload, unit, (first, last))
            sent, update = self.once(division, choice, held_layers[0])
            self._priced[known] = (sent + update, *unit.largest, first, last), choice
        return self._priced[known]

    def _states_of(self, layout: Layout, held_layers: RankLayers, key: tuple[object, ...]) -> float:
        """Return the bytes of model states on a rank with these layers; `key` has what else they
        depend on."""
        key = *key, held_layers
        if key not in self._states:
            terms = model_states(self.setting, layout, held_layers)
            self._states[key] = sum(term.bytes for term in terms)
        return self._states[key]

    def _unit(self, layout: Layout) -> UnitSeconds:
        """Return the seconds of a microbatch's gathers and reductions; cached by the keys that
        matter."""
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
        """Return the seconds per step of data-parallel messages and of the update, on a pipeline
        rank."""
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
        """Return the number of microbatches and their size.

        Both matter if weights are on the host, since these are copied for each microbatch.
        """
        return layout.microbatches(self.setting.train.batch), layout.microbatch

    def _is_summed(self, layout: Layout) -> bool:
        """Whether gradients are summed over microbatches, which model states depend on."""
        return layout.microbatches(self.setting.train.batch) > 1

    def _alike(self, layout: Layout) -> tuple[object, ...]:
        """Return the cache key of what depends on the sharding: model states, and messages per
        step."""
        often = self._often(layout) if layout.offload == "params" else ()
        zero = layout.zero, layout.shard_ranks, layout.replica_ranks, self._is_summed(layout)
        return *zero, layout.tp, layout.ep, layout.etp, layout.offload, often


def _degrees(division: Layout) -> tuple[object, ...]:
    """Return the parallel degrees of a layout, as a cache key for its sharding choices."""
    degrees = division.pp, division.dp_replicate, division.cp, division.tp
    return (*degrees, division.ep, division.etp)


def _best_somewhere(candidates: Sequence[tuple[tuple[float, ...], Choice]]) -> list[Choice]:
    """Return the Pareto-optimal choices: no other one is at most as costly in every cost.

    `candidates` are pairs of a tuple of costs and a choice. Of choices with equal costs, the first.
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


# Settings of which prices are kept: those that a person goes back and forth between.
_MOST: Final = 4


class Prices:
    """Prices of cost inputs that don't depend on the batch or the number of microbatches.

    These are the seconds and saved bytes of a microbatch, and the costs of ZeRO stages. `pins` are
    the layout keys that the user fixed.
    """

    def __init__(self, setting: CostInputs, pins: Pins) -> None:
        self.setting, self.pins = setting, pins
        self.kernels = setting.kernels()
        self.shardings = Shardings(setting, self.kernels, pins)
        self._of_parts = TimesOfParts(setting, self.kernels)
        self._times: dict[tuple[object, ...], MicrobatchTimes] = {}
        self._kept: dict[tuple[object, ...], KeptBytes] = {}
        self._least: dict[tuple[object, ...], float] = {}
        self._floors: dict[tuple[object, ...], float] = {}
        stage = stages_of(setting.model, 1, setting.train.seq_len, setting.system.even_stages)
        self._kinds = RankLayers.of(setting.model, stage).kinds

    def parts(self, layout: Layout, defers: bool = False) -> MicrobatchTimes:
        """Return the seconds of a layout's microbatch by part; cached by `shape_of` the layout.

        `defers` says that the schedule defers weight gradients.
        """
        key = (*shape_of(layout), defers)
        if key not in self._times:
            self._times[key] = self._of_parts.of(layout)
        return self._times[key]

    def least(self, division: Division, microbatch: int) -> float:
        """Return the seconds of a microbatch of so many sequences in the whole model, without
        recomputation: a lower bound over the recomputation policies."""
        key = (*_cut(division.layout), microbatch)
        if key not in self._least:
            layout = division.layout.model_copy(update={"microbatch": microbatch})
            layers, first, last = self.parts(layout).totals
            self._least[key] = sum(map(mul, layers, self._kinds)) + first + last
        return self._least[key]

    def floor(self, division: Division) -> float:
        """Return a lower bound of the seconds per sequence in all layers, over the microbatches
        that are considered and the recomputation policies.

        Seconds per sequence of matmuls (fuller tiles), launches and messages (latencies) are least
        in the largest microbatch, and so are those of their sums and maxima. Of a message, only
        what is never hidden counts.
        """
        key = _cut(division.layout)
        if key not in self._floors:
            train, layout = self.setting.train, division.layout
            largest = most_sequences(train, layout.cp)
            parts = self.parts(layout.model_copy(update={"microbatch": largest}))
            shown = self.kernels.never_hidden(layout.cp_kind)
            layers = (layer.forward + layer.backward + shown.of(layer) for layer in parts.layers)
            self._floors[key] = _ROUNDED * sum(map(mul, layers, self._kinds)) / largest
        return self._floors[key]

    def kept_of(self, layout: Layout) -> KeptBytes:
        """Return the bytes that a layout's microbatch saves for its backward:
        `cost.memory.kept_of`."""
        key = shape_of(layout)
        if key not in self._kept:
            self._kept[key] = kept_of(self.setting, layout)
        return self._kept[key]


class KnownPrices:
    """A cache of the `Prices` of the four most recent cost inputs."""

    def __init__(self) -> None:
        self._last: list[Prices] = []

    def of(self, setting: CostInputs, pins: Pins) -> Prices:
        """Return the `Prices` for these cost inputs, whatever their batch, and these fixed layout
        keys."""
        batch = setting.train.batch
        for known in self._last:
            known_setting = known.setting
            train = known_setting.train.model_copy(update={"batch": batch})
            if known.pins == pins and replace(known_setting, train=train) == setting:
                # Weights on the host are sent for each microbatch.
                known.shardings.setting = setting
                return known
        self._last = [Prices(setting, pins), *self._last[: _MOST - 1]]
        return self._last[0]


def _cut(layout: Layout) -> tuple[object, ...]:
    """Return how a layout divides the work of a sequence, as a cache key."""
    return layout.tp, layout.sp, layout.cp, layout.cp_kind, layout.ep, layout.etp


def shape_of(layout: Layout) -> tuple[object, ...]:
    """Return the layout keys that determine the work of a microbatch, as a cache key."""
    moves = layout.offload == "activations"
    return (
        layout.tp,
        layout.sp,
        layout.cp,
        layout.cp_kind,
        layout.ep,
        layout.etp,
        layout.microbatch,
        layout.recompute,
        moves,
    )


@dataclass(frozen=True, eq=False)
class Pace:
    """The seconds that all microbatches of a step take in a pipeline schedule, without data
    parallelism.

    `count` is the number of microbatches and `parts` the seconds of each. `times` counts the
    pipeline ranks by the layers that they hold, `base` has the seconds of a microbatch on each such
    rank, and `transfer` those of a message between stages.
    """

    schedule: Schedule
    layout: Layout
    count: int
    parts: MicrobatchTimes
    times: Counter[RankLayers]
    base: dict[RankLayers, float]
    transfer: float
    kernels: Kernels

    @cached_property
    def plain(self) -> tuple[RankLayers, float]:
        """The layers of the slowest rank and the seconds of the step, without data-parallel
        messages."""
        return self._of(self.base)

    def among(self, gathers: Waits) -> tuple[RankLayers, float]:
        """Return the layers of the slowest rank and the seconds, with waits for data-parallel
        messages.

        `gathers` has the seconds that each microbatch waits for them.
        """
        return self._of(
            {
                held_layers: seconds + gathers.of(held_layers)
                for held_layers, seconds in self.base.items()
            }
        )

    def _of(self, seconds_by_layers: dict[RankLayers, float]) -> tuple[RankLayers, float]:
        kernels, count = self.kernels, self.count
        slowest = max(seconds_by_layers, key=seconds_by_layers.__getitem__)
        busy, total = (
            count * seconds_by_layers[slowest],
            sum(
                rank_count * seconds_by_layers[held_layers]
                for held_layers, rank_count in self.times.items()
            ),
        )
        order = self.schedule.name, self.layout.pp, self.schedule.virtual, count
        pipeline = closed_form(
            *order, seconds_by_layers[slowest], total, self.transfer, kernels.exposed_pp
        )
        waiting = kernels.idle * (pipeline - busy)
        return slowest, busy + waiting + host_seconds(kernels, count)


class Paces:
    """Computes and caches the `Pace` of each core in each pipeline schedule."""

    def __init__(self, setting: CostInputs, prices: Prices) -> None:
        self._setting, self._prices = setting, prices
        # By core: the limit that they are below, and the schedules that are not.
        self._known: dict[Layout, tuple[float, list[Pace], Counter[str]]] = {}
        self._in_flight: dict[tuple[int, int], dict[RankLayers, float]] = {}
        # The user fixed a schedule by a value; a set has those of another trainer.
        pinned = (prices.pins.get(key) for key in OF_SCHEDULE)
        self._is_fixed = any(not isinstance(value, frozenset | None) for value in pinned)

    def below(
        self, core: Core, orders: Sequence[Schedule], limit: float
    ) -> tuple[list[Pace], Counter[str]]:
        """Return the paces of a core that take less than `limit` seconds, and counts of the others
        by reason.

        `orders` are the schedules to try. A pace has no data-parallel messages, and is thus the
        same for each ZeRO stage.
        """
        layout, count = core.layout, core.microbatches
        known = self._known.get(layout)
        if known is not None and limit <= known[0]:
            return known[1:]
        transfer = transfer_seconds(self._prices.kernels, layout, work_of(self._setting, layout))
        paces, slow = list[Pace](), Counter[str]()
        for order in orders:
            reason = self.loses(order, layout.pp, count)
            if reason is None:
                pace = self.pace(layout, order, count, transfer)
                if pace.plain[1] < limit:
                    paces.append(pace)
                    continue
            slow[reason or "slower"] += 1
        self._known[layout] = limit, paces, slow
        return paces, slow

    def loses(self, order: Schedule, pp: int, count: int) -> str | None:
        """Return why a schedule is not priced: `dominated`, unless the user fixed it."""
        if self._is_fixed:
            return None
        layers, is_even = self._setting.model.n_layers, self._setting.system.even_stages
        return dominated(order, layers, pp, count, is_even=is_even)

    def least_held(self, pp: int, count: int) -> Mapping[RankLayers, float]:
        """Return the fewest microbatches in flight on the first rank over the schedules that are
        priced, by the layers that it holds.

        `count` is the number of microbatches.
        """
        key = pp, count
        if key not in self._in_flight:
            shares: dict[RankLayers, float] = {}
            pins, layers = self._prices.pins, self._setting.model.n_layers
            for order in as_fixed(pins, schedules(pp, layers, count)):
                if self.loses(order, pp, count) is None:
                    layout = with_schedule(Layout(pp=pp), order)
                    held_layers = layers_of_ranks(self._setting, layout)[0]
                    share = least_in_flight(layout, count) / order.virtual
                    shares[held_layers] = min(share, shares.get(held_layers, share))
            self._in_flight[key] = shares
        return self._in_flight[key]

    def pace(self, core_layout: Layout, schedule: Schedule, count: int, transfer: float) -> Pace:
        """Return the pace of a core in a schedule.

        `count` is the number of microbatches, `transfer` the seconds of a message between stages.
        """
        setting, kernels = self._setting, self._prices.kernels
        layout = with_schedule(core_layout, schedule)
        # One that splits the backward of a cut layer hides fewer messages.
        parts = self._prices.parts(
            layout, core_layout.tp > 1 and SCHEDULES[schedule.name].splits_backward
        )
        times = Counter(layers_of_ranks(setting, layout))
        copies = copy_waits(setting, kernels, layout, parts)
        sums = sums_of(setting, kernels, layout)
        base = {
            held_layers: parts.total(held_layers)
            + copies.of(held_layers, schedule.virtual)
            + sums.of(held_layers)
            for held_layers in times
        }
        return Pace(schedule, layout, count, parts, times, base, transfer, kernels)


@lru_cache(maxsize=4096)
def least_idle(pp: int, layers: int, microbatches: int) -> float:
    """Return the smallest pipeline bubble over the legal schedules, as a share of a rank's busy
    time.

    Assumes equally fast ranks and messages that take no time.
    """
    of_one = (
        closed_form(order.name, pp, order.virtual, microbatches, 1.0, pp, 0.0, 0.0)
        for order in schedules(pp, layers, microbatches)
    )
    return min(of_one, default=float(microbatches)) / microbatches - 1
