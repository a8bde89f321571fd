"""Ranks the layouts that fit by step time, and counts the others by the reason why they lose."""

from __future__ import annotations

import gc
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter, mul
from typing import NamedTuple, get_args

from meshwright.cost.data_messages import UnitSeconds, Waits, data_wait, unit_waits
from meshwright.cost.host import copy_waits
from meshwright.cost.inputs import CostInputs, stages_of
from meshwright.cost.memory import activations, least_activations
from meshwright.cost.price import Prediction, RankMemory, worst_memory
from meshwright.cost.step import host_seconds
from meshwright.cost.work import RankLayers
from meshwright.layout import Layout, broken
from meshwright.planner.lightest import lightest
from meshwright.planner.prices import (
    Choice,
    Fits,
    Pace,
    Paces,
    Prices,
    least_idle,
    preference,
    shape_of,
)
from meshwright.planner.space import (
    OF_DIVISION,
    Core,
    Counts,
    Division,
    Pins,
    Schedule,
    admits,
    as_fixed,
    divisions,
    obeys,
    schedules,
    with_schedule,
    with_sharding,
)
from meshwright.spec.training import Offload


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn Python's garbage collector off inside the `with` block.

    A search makes hundreds of thousands of small objects and keeps many of them until its end. They
    have no cycles, but the collector would look through all of them again and again, for a tenth to
    a fifth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Share of a device's memory that a plan leaves free: a prediction is a few percent off.
MARGIN = 0.05
# So many divisions are compared with each other by `preference`, whatever is asked for.
_COMPARED = 8
# Of layouts that are not priced where another one fits, the reason.
_ON_REQUEST = (
    "offload of activations: only on request (layout.offload = activations), or where nothing else "
    "fits, since hosts may have to hold terabytes"
)


@dataclass(frozen=True)
class Found:
    """The result of a search: the best layout of each kind, best first.

    Layouts of a kind have the same pp, tp, ep and expert tp. `considered` counts all legal layouts,
    `reasons` those ruled out, by reason. `unfit_layout` is the layout that came closest to fitting,
    and `unfit` its memory; both are None if some layout fits.
    """

    setting: CostInputs
    ranked: tuple[Prediction, ...]
    considered: int
    reasons: dict[str, int]
    unfit: RankMemory | None
    unfit_layout: Layout | None


# The seconds below which a core's layouts were sought, the fastest that fits with its seconds, and
# what was ruled out on the way.
_Best = tuple[float, tuple[float, Layout] | None, Counter[str]]
# The fastest layout of each division of the devices, with its seconds.
_OfDivisions = dict[tuple[int, ...], tuple[float, Layout]]
# The offloads that a pass of the search tries.
_Pass = tuple[Offload, ...]


class _Node(NamedTuple):
    """What a search has still to look into: a division, one with a single microbatch, or a core.

    `bound` is a lower bound of its step time in seconds. Among equal bounds, `order` decides: the
    group, microbatch, recomputation and number of the division. `level` is 0, 1 or 2.
    """

    bound: float
    order: tuple[int, int, int, int]
    level: int
    choice: Division | Core


# Seconds, the place of the choice among its core's, a schedule and a choice.
_Candidate = tuple[float, int, Schedule, Choice]


class Search:
    """One search over the legal layouts of a number of devices.

    Groups layouts by core (see `space.Core`). The price of a layout is a sum of parts that each
    depend on few of its keys and are computed once: the microbatch on the core, the pipeline on the
    schedule, states and gradients on the ZeRO stage. Memory and pipeline are closed forms. The best
    layouts are then checked and ranked by their exact price, `cost.price`. `pins` are the layout
    keys that the user fixed. `prices` are those of an earlier search with the same cost inputs,
    whatever its batch.
    """

    def __init__(
        self,
        setting: CostInputs,
        devices: int,
        margin: float = MARGIN,
        pins: Pins | None = None,
        prices: Prices | None = None,
    ) -> None:
        self.setting, self.devices, self.pins = setting, devices, pins or {}
        self.limit = setting.cluster.device.memory * (1 - margin)
        self.fits = Fits(setting, self.limit)
        self.prices = Prices(setting, self.pins) if prices is None else prices
        self.kernels = self.prices.kernels
        self.reasons: Counter[str] = Counter()
        self.nearest: tuple[float, Layout] | None = None
        stage = stages_of(setting.model, 1, setting.train.seq_len, setting.system.even_stages)
        self._kinds = RankLayers.of(setting.model, stage).kinds
        self._held: dict[tuple[object, ...], float] = {}
        self._bests: dict[tuple[object, ...], _Best] = {}
        self._opened: dict[tuple[object, ...], list[_Node]] = {}
        self._idle: dict[tuple[int, int, int], float] = {}
        self.counts = Counts(setting.model.n_layers, self.pins)
        self._divisions = self._legal()
        self._paces = Paces(setting, self.prices)

    @uncollected()
    def run(self, top: int) -> Found:
        """Return the best layout of each of the `top` best kinds (see `Found`).

        Branch and bound: divisions, their microbatches and cores are tried in the order of a lower
        bound of their step time, each tighter than the one before. What exceeds the worst layout
        still listed is skipped, with all that is below it, without being priced.
        """
        first, moving = self._passes()
        starts = self._starts()
        considered = sum(map(self._size_of, (*first, *moving)))
        ranked = self._fitting(first, starts, top)
        if not ranked:
            ranked = self._fitting(moving, starts, top)
        elif moving:
            self.reasons[_ON_REQUEST] += sum(map(self._size_of, moving))
        layout = None if ranked else self._nearest()
        memory = worst_memory(self.setting, layout) if layout else None
        reasons = {reason: count for reason, count in self.reasons.most_common() if count}
        return Found(self.setting, tuple(ranked), considered, reasons, memory, layout)

    def _starts(self) -> list[_Node]:
        """Return a heap of the nodes of all divisions."""
        starts = [
            _Node(self._floor(division), (division.group, 0, 0, division.number), 0, division)
            for division in self._divisions
        ]
        heapq.heapify(starts)
        return starts

    def _passes(self) -> tuple[list[_Pass], list[_Pass]]:
        """Return the passes of the search, and those for when nothing fits, each by the offloads to
        try.

        The first pass has no offload: its layouts are mostly the fastest, and their step times rule
        out most layouts of the next pass by the time of their microbatches alone.
        """
        is_free, pinned = "offload" not in self.pins, self.pins.get("offload")
        first: list[_Pass] = [("none",), ("optimizer", "params")]
        first = [
            offloaded
            for offloaded in first
            if is_free or any(admits(pinned, offload) for offload in offloaded)
        ]
        moves = is_free or admits(pinned, "activations")
        return first, [("activations",)] if moves else []

    def _size_of(self, offloaded: _Pass) -> int:
        """Return the number of legal layouts with these values of `layout.offload`."""
        return sum(self.counts.of_division(division, offloaded) for division in self._divisions)

    def _nearest(self) -> Layout | None:
        """Return the layout that exceeds the memory limit least, for a search in which none
        fits."""
        noted = [] if self.nearest is None else [self.nearest[1]]
        if not self.pins:  # `lightest` does not know what the user fixed
            ways = (lightest(self.setting, self.devices, offload=way) for way in get_args(Offload))
            noted += (light.layout for light in ways if light is not None)
        legal = [
            candidate
            for candidate in noted
            if broken(self.setting.model, self.setting.train, candidate) is None
        ]
        return min(legal, key=lambda candidate: self.fits.estimate(candidate).total, default=None)

    def _fitting(self, passes: list[_Pass], starts: list[_Node], top: int) -> list[Prediction]:
        """Return the prices of the best layout of each of the `top` best kinds; all of them fit.

        If the exact memory of one exceeds the limit although its estimate did not, searches again.
        """
        reasons_before, best = self.reasons.copy(), _OfDivisions()
        while True:
            for offloaded in passes:
                self._pass(starts, top, offloaded, best)
            # What is slower was come across or not, as the order of the search had it.
            worst = _worst(best, top)
            best = {degrees: fastest for degrees, fastest in best.items() if fastest[0] <= worst}
            fastest = heapq.nsmallest(_COMPARED, best.values(), key=itemgetter(0))
            best_layouts = {layout for _, layout in [*fastest, *_of_kinds(best).values()]}
            timed = sorted(map(self.fits.timed, best_layouts), key=preference)
            priced = [self.fits.priced(prediction) for prediction in first_of_kinds(timed)[:top]]
            if all(prediction.memory.total <= self.limit for prediction in priced):
                # The first is preferred; why each other is not shows best in order of their time.
                return [*priced[:1], *sorted(priced[1:], key=_seconds_of)]
            self.reasons = reasons_before.copy()
            # The others stay the best of their divisions: none was skipped for a faster one.
            best = {
                degrees: fastest for degrees, fastest in best.items() if self._still_fits(fastest)
            }

    def _legal(self) -> list[Division]:
        """Return the legal divisions that have the layout keys that the user fixed."""
        legal = divisions(self.setting.model, self.setting.train, self.devices)
        if not self.pins:
            return list(legal)
        matching = [choice for choice in legal if obeys(self.pins, choice.layout, OF_DIVISION)]
        sp = self.pins.get("sp")
        if sp is None:
            return matching
        # Without tp there is no sequence to split: sp = true changes nothing.
        return [
            division._replace(layout=layout.model_copy(update={"sp": bool(sp and layout.sp)}))
            for division in matching
            for layout in [division.layout]
            if (layout.sp or not sp or layout.tp == 1) and (sp or layout.folds == 1)
        ]

    def _pass(self, starts: list[_Node], top: int, offloaded: _Pass, best: _OfDivisions) -> None:
        """Search with these offloads, and update the best layout by parallel degrees in `best`.

        `starts` is a heap of all divisions.
        """
        worst, heap, tried = _worst(best, top), starts.copy(), 0
        while heap:
            node = heapq.heappop(heap)
            division_best = best.get(node.choice.degrees)
            if node.bound >= worst:  # and so are all that are left
                break
            limit = min(worst, division_best[0] if division_best else worst)
            if node.bound >= limit:
                continue
            if not isinstance(node.choice, Core):
                for below in self._below(node, offloaded):
                    heapq.heappush(heap, below)
                continue
            tried += self.counts.of_core(node.choice, offloaded)
            improved = self._best_again(node, limit, offloaded)
            if improved is not None:
                best[node.choice.degrees] = improved
                worst = _worst(best, top)
        slower = self._size_of(offloaded) - tried
        self.reasons["slower by the time of its microbatches alone"] += slower

    def _below(self, node: _Node, offloaded: _Pass) -> list[_Node]:
        """Return the microbatches of a division, or the cores of a microbatch, with their
        bounds."""
        key = node.order, node.level, "activations" in offloaded
        if key not in self._opened:
            below = self._cores(node, offloaded) if node.level else self._microbatches(node)
            self._opened[key] = below
        return self._opened[key]

    def _microbatches(self, node: _Node) -> list[_Node]:
        division, (group, *_, number) = node.choice, node.order
        assert isinstance(division, Division)
        pinned = self.pins.get("microbatch")
        return [
            _Node(
                self._evenly(
                    division.degrees[0],
                    division.sequences // size,
                    self.prices.least(division, size),
                ),
                (group, place, 0, number),
                1,
                division._replace(microbatches=(size,)),
            )
            for place, size in enumerate(division.microbatches)
            if pinned is None or admits(pinned, size)
        ]

    def _cores(self, node: _Node, offloaded: _Pass) -> list[_Node]:
        division, (group, place, _, number) = node.choice, node.order
        assert isinstance(division, Division)
        offload: Offload = "activations" if "activations" in offloaded else "none"
        (microbatch,) = division.microbatches
        cores = [division.core(microbatch, policy, offload) for policy in self.counts.recomputes]
        return [
            _Node(self._bound(core), (group, place, index, number), 2, core)
            for index, core in enumerate(cores)
        ]

    def _floor(self, division: Division) -> float:
        """Return a lower bound of the step time of a division's layouts, in seconds."""
        pp, count = division.degrees[0], division.sequences
        idle = self._least_idle(division)
        layers = count * self.prices.floor(division) / pp * (1 + idle)
        fewest = count // division.microbatches[-1]
        return layers + host_seconds(self.kernels, fewest)

    def _least_idle(self, division: Division) -> float:
        """Return the smallest pipeline bubble over a division's microbatches, as in `_evenly`."""
        pp, count, sizes = division.degrees[0], division.sequences, division.microbatches
        key = pp, count, len(sizes)
        if key not in self._idle:
            layers = self.setting.model.n_layers
            smallest = (
                min(least_idle(pp, layers, count // size) for size in sizes) if pp > 1 else 0.0
            )
            self._idle[key] = smallest * min(self.kernels.idle, 1.0)
        return self._idle[key]

    def _bound(self, core: Core) -> float:
        """Return a lower bound of the step time of a core's layouts, in seconds.

        It has the microbatches, spread evenly over the pipeline, and the smallest bubble of any
        schedule.
        """
        layout, parts = core.layout, self.prices.parts(core.layout)
        layers, first, last = parts.totals
        if layout.offload == "activations":
            waits = copy_waits(self.setting, self.kernels, layout, parts)
            layers = tuple(map(sum, zip(layers, waits.forward, waits.backward, strict=True)))
        layer_seconds: float = sum(map(mul, layers, self._kinds))
        return self._evenly(core.degrees[0], core.microbatches, layer_seconds + first + last)

    def _evenly(self, pp: int, count: int, seconds: float) -> float:
        """Return the seconds of a step of `count` microbatches of so many seconds, spread evenly
        over `pp` stages, with the least bubble."""
        microbatches = count * seconds / pp
        if pp > 1:
            idle = least_idle(pp, self.setting.model.n_layers, count)
            # More than all of it is idle where stages differ, and the slowest has less to wait for.
            microbatches *= 1 + idle * min(self.kernels.idle, 1.0)
        return microbatches + host_seconds(self.kernels, count)

    def _best_again(
        self, node: _Node, limit: float, offloaded: _Pass
    ) -> tuple[float, Layout] | None:
        """Return `_best_of` a core's node, from the cache unless that layout turned out not to
        fit."""
        assert isinstance(node.choice, Core)
        # Where nothing was too large yet, a core that is gets looked into for the nearest layout.
        key = (node.order, offloaded, self.nearest is None)
        known = self._bests.get(key)
        # What was sought below a higher limit is known below this one, too.
        if known is None or known[0] < limit or not self._still_fits(known[1]):
            before, self.reasons = self.reasons, Counter[str]()
            known = limit, self._best_of(node.choice, limit, offloaded), self.reasons
            self._bests[key], self.reasons = known, before
        _, fastest, reasons = known
        self.reasons.update(reasons)
        return None if fastest is None or fastest[0] >= limit else fastest

    def _still_fits(self, fastest: tuple[float, Layout] | None) -> bool:
        return fastest is None or self.fits.estimate(fastest[1]).total <= self.limit

    def _best_of(
        self, core: Core, limit: float, offloaded: tuple[Offload, ...]
    ) -> tuple[float, Layout] | None:
        """Return the fastest layout of a core that fits, with its seconds; None if none beats
        `limit`."""
        core_layout, setting = core.layout, self.setting
        layers, count = setting.model.n_layers, core_layout.microbatches(setting.train.batch)
        if self._is_too_large(self._least_bytes(core, offloaded)):
            self.reasons["does not fit"] += self.counts.of_core(core, offloaded)
            return None
        orders = as_fixed(self.pins, schedules(core_layout.pp, layers, count))
        paces, slow = self._paces.below(core, orders, limit)
        if not any(pace.plain[1] < limit for pace in paces):
            layouts_per_order = self.counts.of_core(core, offloaded) // max(len(orders), 1)
            for reason, number in slow.items():
                self.reasons[reason] += number * layouts_per_order
            self.reasons["slower"] += len(paces) * layouts_per_order
            return None
        choices = self.prices.shardings.of(core_layout, offloaded)
        for reason, number in slow.items():
            self.reasons[reason] += number * len(choices)
        fast = [pace for pace in paces if pace.plain[1] < limit]
        self.reasons["slower"] += (len(paces) - len(fast)) * len(choices)
        parts = self.prices.parts(core_layout)
        units = {choice.unit for choice in choices} if fast else ()
        waits = {unit: unit_waits(self.kernels, unit, parts) for unit in units if not unit.is_none}
        candidates = [
            candidate
            for pace in fast
            for candidate in self._of_schedule(core_layout, pace, choices, waits, limit)
        ]
        for seconds, _, schedule, choice in sorted(candidates, key=lambda c: c[:2]):
            layout = self._with(core_layout, schedule, choice)
            memory = self.fits.estimate(layout, self.prices.kept_of(layout))
            if memory.total <= self.limit:
                # The rules have the last word; the space follows them already.
                if broken(setting.model, setting.train, layout) is None:
                    return seconds, layout
                continue
            self._note_unfit(memory.total, core_layout, schedule, choice)
        return None

    def _least_bytes(self, core: Core, offloaded: tuple[Offload, ...]) -> float:
        """Return a lower bound of the bytes of tensors on a core's first rank, over its schedules
        and ZeRO stages; infinite if it has none."""
        kept_bytes, shardings = self.prices.kept_of(core.layout), self.prices.shardings
        return min(
            (
                least_activations(self.setting, held_layers, share, kept_bytes)
                + shardings.least_states(core.layout, held_layers, offloaded)
                for held_layers, share in self._paces.least_held(
                    core.layout.pp, core.microbatches
                ).items()
            ),
            default=math.inf,
        )

    def _is_too_large(self, least_bytes: float) -> bool:
        """Whether this many bytes do not fit, and a layout closer to fitting is already known."""
        return (
            least_bytes > self.limit and self.nearest is not None and least_bytes >= self.nearest[0]
        )

    def _of_schedule(
        self,
        core_layout: Layout,
        pace: Pace,
        choices: list[Choice],
        waits: dict[UnitSeconds, Waits],
        limit: float,
    ) -> list[_Candidate]:
        """Return the layouts with a schedule that take less than `limit` seconds and may fit.

        `choices` are the ZeRO stages to try, `waits` the seconds that each adds to a microbatch.
        """
        setting, kernels, schedule = self.setting, self.kernels, pace.schedule
        first, last = (self._activations(pace.layout, rank) for rank in (0, core_layout.pp - 1))
        paces, candidates = dict[UnitSeconds, tuple[RankLayers, float, float]](), []
        for index, choice in enumerate(choices):
            states = choice.states
            needed = max(first + states[0], last + states[1])
            if needed > self.limit:
                self._note_unfit(needed, core_layout, schedule, choice)
                continue
            if choice.unit not in paces:
                gathers = waits.get(choice.unit)
                slowest, seconds = pace.plain if gathers is None else pace.among(gathers)
                paces[choice.unit] = slowest, seconds, pace.parts.room(slowest)
            slowest, seconds, room = paces[choice.unit]
            sent, update = self.prices.shardings.once(core_layout, choice, slowest)
            seconds += data_wait(setting, kernels, sent, room) + update
            if seconds < limit:
                candidates.append((seconds, index, schedule, choice))
            else:
                self.reasons["slower"] += 1
        return candidates

    def _activations(self, layout: Layout, rank: int) -> float:
        """Return the bytes of a pipeline rank's activations in closed form; the same for all ZeRO
        stages."""
        key = (
            *shape_of(layout),
            layout.pp,
            layout.dp,
            layout.schedule,
            layout.virtual_stages,
            rank,
        )
        if key not in self._held:
            kept_bytes = self.prices.kept_of(layout)
            self._held[key] = sum(
                term.bytes for term in activations(self.setting, layout, rank, kept_bytes)
            )
        return self._held[key]

    def _with(self, layout: Layout, schedule: Schedule | None, choice: Choice | None) -> Layout:
        if schedule is not None:
            layout = with_schedule(layout, schedule)
        if choice is not None:
            layout = with_sharding(layout, choice.sharding, choice.offload)
        return layout

    def _note_unfit(
        self, needed: float, core_layout: Layout, schedule: Schedule, choice: Choice
    ) -> None:
        self.reasons["does not fit"] += 1
        if self.nearest is None or needed < self.nearest[0]:
            self.nearest = (needed, self._with(core_layout, schedule, choice))


def first_of_kinds(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Return the first prediction of each kind of layout (same pp, tp, ep and expert tp)."""
    firsts: dict[tuple[int, ...], Prediction] = {}
    for prediction in predictions:
        firsts.setdefault(_kind_of(prediction.layout), prediction)
    return [*firsts.values()]


def _kind_of(layout: Layout) -> tuple[int, ...]:
    """Return the degrees that define a layout's kind: pp, tp, ep and expert tp."""
    return layout.pp, layout.tp, layout.ep, layout.expert_tp


def _of_kinds(best: _OfDivisions) -> _OfDivisions:
    """Return the fastest layout of each kind, with its seconds; keyed by kind."""
    kinds: _OfDivisions = {}
    for candidate in best.values():
        kind = _kind_of(candidate[1])
        kinds[kind] = min(kinds.get(kind, candidate), candidate, key=itemgetter(0))
    return kinds


def _worst(best: _OfDivisions, top: int) -> float:
    """Return the seconds above which a layout need not be searched: it would not be shown or
    compared."""
    return max(_nth_least(_of_kinds(best), top), _nth_least(best, _COMPARED))


def _nth_least(best: _OfDivisions, count: int) -> float:
    if len(best) < count:
        return float("inf")
    return heapq.nsmallest(count, (seconds for seconds, _ in best.values()))[-1]


def _seconds_of(prediction: Prediction) -> float:
    return prediction.time.total
