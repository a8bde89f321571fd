"""Ranks layouts by tokens per second among those that fit, and says why the others lose."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from meshwright.layout import Layout, broken
from meshwright.layout.schedules import SCHEDULES
from meshwright.predict.memory import activations, model_states
from meshwright.predict.pipeline import closed_form
from meshwright.predict.price import Prediction, RankMemory, worst_memory
from meshwright.predict.setting import Setting, held_by, stages_of, work_of
from meshwright.predict.step import (
    MicrobatchTimes,
    Waits,
    data_messages,
    data_wait,
    gather_waits,
    host_seconds,
    optimizer_seconds,
    parts_of,
    transfer_seconds,
    unit_messages,
)
from meshwright.predict.work import HeldLayers
from meshwright.search.fits import Fits, preference
from meshwright.search.space import (
    OF_CORE,
    OF_SHARDING,
    Core,
    Pins,
    Schedule,
    ZeroSharding,
    as_fixed,
    cores,
    obeys,
    offloads,
    schedules,
    shardings,
    size_of,
    with_schedule,
    with_sharding,
)
from meshwright.spec.training import Offload

# Share of a device's memory that a plan leaves free: a prediction is a few percent off.
MARGIN = 0.05
# So many divisions are held against each other by `preference`, whatever is asked for.
_COMPARED = 8
# What the lightest schedule holds on the first rank, in what 1F1B holds there.
_LEAST_IN_FLIGHT = 0.9
# Schedules that others beat by what they are, and why.
_DOMINATED = {
    "naive": "one microbatch at a time: 1F1B is never slower",
    "gpipe": "GPipe holds all microbatches and takes as long as 1F1B",
    "looped_bfs": "breadth-first holds all microbatches and takes as long as interleaved 1F1B",
}


@dataclass(frozen=True)
class Found:
    """A search's result: the best layout of each division of the devices, the best first.

    `considered` counts all legal layouts, `reasons` those that were ruled out, by reason;
    `unfit` is the one that came nearest to fitting, where none does.
    """

    setting: Setting
    ranked: tuple[Prediction, ...]
    considered: int
    reasons: dict[str, int]
    unfit: RankMemory | None
    unfit_layout: Layout | None


@dataclass(frozen=True)
class _Choice:
    """A ZeRO stage with its shards and what is offloaded, priced for one division of the devices.

    `sent` are the seconds of its messages once a step, `update` those of the optimizer, `gathers`
    those of a layer's messages in each microbatch, `states` the
    bytes of model states on the first and the last pipeline rank.
    """

    sharding: ZeroSharding
    offload: Offload
    sent: float
    update: float
    gathers: float
    states: tuple[float, float]


class Search:
    """One search: a setting, a number of devices, a margin, keys of the layout that are fixed.

    What a layout costs falls into parts that depend on few choices each: the microbatch's time on
    its core, the pipeline's on the schedule, states and gradients on the ZeRO stage. So the parts
    are priced once, and all layouts of a core are sums of them, with memory and the pipeline in
    closed form. A layout fits, and has its place among the best, by its price: `predict.price`.
    """

    def __init__(
        self, setting: Setting, devices: int, margin: float = MARGIN, pins: Pins | None = None
    ) -> None:
        self.setting, self.devices, self.pins = setting, devices, pins or {}
        self.limit = setting.cluster.device.memory * (1 - margin)
        self.fits = Fits(setting, self.limit)
        self.kernels = setting.kernels()
        self.reasons: Counter[str] = Counter()
        self.nearest: tuple[float, Layout] | None = None
        whole = stages_of(setting.model, 1, setting.train.seq_len, setting.system.even_stages)
        self._kinds = HeldLayers.of(setting.model, whole).kinds
        self._parts: list[MicrobatchTimes] = []
        self._choices: dict[tuple[object, ...], list[_Choice]] = {}
        self._seconds_once: dict[tuple[object, ...], tuple[float, float]] = {}

    def run(self, top: int) -> Found:
        """Return the best layouts of the `top` best divisions of the devices.

        Cores come in the order of a bound from below, the time of their microbatches alone; what
        cannot beat the worst of the best any more is left out without a price.
        """
        train, layers = self.setting.train, self.setting.model.n_layers
        everything = self._cores()
        self._parts = [parts_of(self.setting, self.kernels, core.layout) for core in everything]
        order = sorted((self._bound(core, index), index) for index, core in enumerate(everything))
        ranked = self._fitting(everything, order, top, ("none",))
        if not ranked:
            ranked = self._fitting(everything, order, top, ("optimizer", "params"))
        else:
            self.reasons["offload: layouts without it fit, and are faster"] += sum(
                size_of(core, train, layers, None, self.pins)
                - size_of(core, train, layers, ("none",), self.pins)
                for core in everything
            )
        considered = sum(size_of(core, train, layers, None, self.pins) for core in everything)
        layout = self.nearest[1] if self.nearest and not ranked else None
        held = worst_memory(self.setting, layout) if layout else None
        reasons = {why: count for why, count in self.reasons.most_common() if count}
        return Found(self.setting, tuple(ranked), considered, reasons, held, layout)

    def _fitting(
        self,
        everything: list[Core],
        order: list[tuple[float, int]],
        top: int,
        offloaded: tuple[Offload, ...],
    ) -> list[Prediction]:
        """Return the prices of the `top` best layouts with such offloads, all of which fit.

        Where one does not, against its estimate, they are searched once more without it.
        """
        before = self.reasons.copy()
        while True:
            found = self._pass(everything, order, max(top, _COMPARED), offloaded)
            timed = sorted((self.fits.timed(layout) for _, layout in found), key=preference)
            priced = [self.fits.priced(one) for one in timed[:top]]
            if all(one.memory.total <= self.limit for one in priced):
                return priced
            self.reasons = before.copy()

    def _cores(self) -> list[Core]:
        """Return the legal cores, or those of them that are as the user fixed them."""
        found = cores(self.setting.model, self.setting.train, self.devices)
        if not self.pins:
            return list(found)
        kept = (core.layout for core in found if obeys(self.pins, core.layout, OF_CORE))
        sp = self.pins.get("sp")
        if sp is None:
            return [Core(one) for one in kept]
        # Without tp there is no sequence to split: sp = true changes nothing.
        return [
            Core(one.model_copy(update={"sp": bool(sp and one.sp)}))
            for one in kept
            if one.sp or not sp or one.tp == 1
        ]

    def _pass(
        self,
        everything: list[Core],
        order: list[tuple[float, int]],
        top: int,
        offloaded: tuple[Offload, ...],
    ) -> list[tuple[float, Layout]]:
        """Return the best layouts with such offloads, the best of each division of the devices."""
        train, layers = self.setting.train, self.setting.model.n_layers
        best: dict[tuple[int, ...], tuple[float, Layout]] = {}
        for bound, index in order:
            core = everything[index]
            own = best.get(core.degrees)
            limit = min(_worst(best, top), own[0] if own else float("inf"))
            if bound >= limit:
                size = size_of(core, train, layers, offloaded, self.pins)
                self.reasons["slower by the time of its microbatches alone"] += size
                continue
            found = self._best_of(core, self._parts[index], limit, offloaded)
            if found is not None:
                best[core.degrees] = found
        return heapq.nsmallest(top, best.values(), key=lambda pair: pair[0])

    def _bound(self, core: Core, index: int) -> float:
        """Return a time that no layout of a core beats: its microbatches, spread evenly."""
        one = core.layout
        parts = self._parts[index]
        count = one.microbatches(self.setting.train.batch)
        whole = sum(one.total * count for one, count in zip(parts.layers, self._kinds, strict=True))
        microbatches = count * (whole + parts.first.total + parts.last.total) / one.pp
        return microbatches + host_seconds(self.kernels, count)

    def _best_of(
        self, core: Core, parts: MicrobatchTimes, limit: float, offloaded: tuple[Offload, ...]
    ) -> tuple[float, Layout] | None:
        """Return the fastest layout of a core that fits, if it beats a limit."""
        one, setting = core.layout, self.setting
        choices = self._priced_choices(one, offloaded)
        if not choices:
            return None
        count = one.microbatches(setting.train.batch)
        orders = as_fixed(self.pins, one, schedules(one.pp, setting.model.n_layers, count))
        lightest = min(choice.states[0] for choice in choices)
        least = _LEAST_IN_FLIGHT * self._activations(one)[0] + lightest
        if least > self.limit and self.nearest is not None:
            self.reasons["does not fit"] += len(choices) * len(orders)
            return None
        priced = [(self._with(one, None, choice), choice) for choice in choices]
        waits = [gather_waits(setting, self.kernels, layout, parts) for layout, _ in priced]
        candidates = []
        for schedule in orders:
            why = dominated(schedule, setting.model.n_layers, one.pp)
            if why is not None:
                self.reasons[why] += len(priced)
                continue
            candidates += self._of_schedule(one, schedule, count, parts, priced, waits, limit)
        for seconds, _, schedule, choice in sorted(candidates, key=lambda c: c[:2]):
            layout = self._with(one, schedule, choice)
            held = self.fits.estimate(layout)
            if held.total <= self.limit:
                # The rules have the last word; the space follows them already.
                if broken(setting.model, setting.train, layout) is None:
                    return seconds, layout
                continue
            self._note_unfit(held.total, one, schedule, choice)
        return None

    def _of_schedule(
        self,
        one: Layout,
        schedule: Schedule,
        count: int,
        parts: MicrobatchTimes,
        priced: list[tuple[Layout, _Choice]],
        waits: list[Waits],
        limit: float,
    ) -> list[tuple[float, int, Schedule, _Choice]]:
        """Return a schedule's layouts that beat the limit and may fit."""
        setting, kernels = self.setting, self.kernels
        layout = self._with(one, schedule, None)
        if one.tp > 1 and SCHEDULES[schedule.name].splits_backward:  # hides fewer messages
            parts = parts_of(setting, kernels, layout)
        ranks = Counter(held_by(setting, layout))
        base = {held: parts.total(held) for held in ranks}
        transfer = transfer_seconds(kernels, layout, work_of(setting, one))
        kept = self._activations(layout)
        found = []
        host = host_seconds(kernels, count)
        for index, ((sharded, choice), gathers) in enumerate(zip(priced, waits, strict=True)):
            whole = {held: base[held] + gathers.of(held) for held in ranks}
            slowest = max(whole, key=whole.__getitem__)
            longest = whole[slowest]
            pipeline = closed_form(
                schedule.name,
                one.pp,
                schedule.virtual,
                count,
                longest,
                sum(times * whole[held] for held, times in ranks.items()),
                transfer,
                kernels.exposed_pp,
            )
            busy = count * longest
            sent, update = self._once(sharded, slowest)
            after = data_wait(setting, kernels, sent, parts.room(slowest)) + update
            seconds = busy + kernels.idle * (pipeline - busy) + after + host
            if seconds >= limit:
                self.reasons["slower"] += 1
                continue
            needed = max(a + b for a, b in zip(kept, choice.states, strict=True))
            if needed > self.limit:
                self._note_unfit(needed, one, schedule, choice)
                continue
            found.append((seconds, index, schedule, choice))
        return found

    def _activations(self, layout: Layout) -> tuple[float, float]:
        first, last = (
            sum(term.bytes for term in activations(self.setting, layout, rank))
            for rank in (0, layout.pp - 1)
        )
        return first, last

    def _priced_choices(self, one: Layout, offloaded: tuple[Offload, ...]) -> list[_Choice]:
        """Return the ZeRO stages of a division of the devices, with what each costs."""
        # Weights on the host are sent anew for each microbatch.
        often = one.microbatch if "params" in offloaded else 0
        key = (one.pp, one.dp_replicate, one.cp, one.tp, one.ep, offloaded, often)
        if key not in self._choices:
            found = [
                self._choice(one, sharding, offload)
                for sharding in shardings(one.dp_replicate, one.cp, one.ep)
                for offload in offloads(sharding.zero)
                if offload in offloaded
            ]
            found = [
                choice
                for choice in found
                if obeys(self.pins, self._with(one, None, choice), OF_SHARDING)
            ]
            self._choices[key] = [
                choice
                for place, choice in enumerate(found)
                if not any(
                    _is_worse(choice, other, found.index(other) < place)
                    for other in found
                    if other is not choice
                )
            ]
        return self._choices[key]

    def _choice(self, one: Layout, sharding: ZeroSharding, offload: Offload) -> _Choice:
        setting, kernels = self.setting, self.kernels
        bare = _Choice(sharding, offload, 0.0, 0.0, 0.0, (0.0, 0.0))
        layout = self._with(one, None, bare)
        held = held_by(setting, layout)
        first, last = (
            sum(term.bytes for term in model_states(setting, layout, held[rank]))
            for rank in (0, one.pp - 1)
        )
        return _Choice(
            sharding,
            offload,
            *self._once(layout, held[0]),
            sum(unit_messages(setting, kernels, layout)),
            (first, last),
        )

    def _once(self, layout: Layout, held: HeldLayers) -> tuple[float, float]:
        """Return the seconds of a pipeline rank's messages and of its update, once a step."""
        often = layout.microbatch if layout.offload == "params" else 0
        shared = (layout.dp_replicate, layout.dp_shard, layout.zero, layout.offload, often)
        key = (layout.pp, layout.cp, layout.tp, layout.ep, *shared, held)
        if key not in self._seconds_once:
            self._seconds_once[key] = (
                data_messages(self.setting, self.kernels, layout, held),
                optimizer_seconds(self.setting, self.kernels, layout, held),
            )
        return self._seconds_once[key]

    def _with(self, one: Layout, schedule: Schedule | None, choice: _Choice | None) -> Layout:
        if schedule is not None:
            one = with_schedule(one, schedule)
        if choice is not None:
            one = with_sharding(one, choice.sharding, choice.offload)
        return one

    def _note_unfit(self, needed: float, one: Layout, schedule: Schedule, choice: _Choice) -> None:
        self.reasons["does not fit"] += 1
        if self.nearest is None or needed < self.nearest[0]:
            self.nearest = (needed, self._with(one, schedule, choice))


def _is_worse(one: _Choice, other: _Choice, is_before: bool) -> bool:
    """Whether a choice is nowhere better than another; of equal ones the first stays."""
    mine = (one.sent + one.update, one.gathers, *one.states)
    others = (other.sent + other.update, other.gathers, *other.states)
    return all(a >= b for a, b in zip(mine, others, strict=True)) and (mine != others or is_before)


def dominated(schedule: Schedule, layers: int, pp: int) -> str | None:
    """Return why a schedule need not be priced, if another is never worse."""
    if schedule.virtual > 1 and layers % (pp * schedule.virtual):
        return "stages of unequal numbers of layers"
    return _DOMINATED.get(schedule.name)


def _worst(best: dict[tuple[int, ...], tuple[float, Layout]], top: int) -> float:
    if len(best) < top:
        return float("inf")
    return heapq.nsmallest(top, (seconds for seconds, _ in best.values()))[-1]
