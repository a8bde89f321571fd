"""`Pace`: what a core's microbatches take in a schedule, whatever ZeRO stage is chosen for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from meshwright.cost.data_messages import Waits
from meshwright.cost.host import copy_waits
from meshwright.cost.inputs import CostInputs, layers_of_ranks, work_of
from meshwright.cost.kernels import Kernels
from meshwright.cost.microbatch import MicrobatchTimes
from meshwright.cost.pipeline import closed_form
from meshwright.cost.step import host_seconds, transfer_seconds
from meshwright.cost.sums import sums_of
from meshwright.cost.work import RankLayers
from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES
from meshwright.planner.prices import Prices
from meshwright.planner.space import (
    OF_SCHEDULE,
    Core,
    Schedule,
    dominated,
    schedules,
    with_schedule,
)


@dataclass(frozen=True, eq=False)
class Pace:
    """The seconds that a core's microbatches take in a schedule, with the host's work for them.

    `times` counts the ranks of a pipeline by the layers that they hold, `base` has the seconds of a
    microbatch on each, `transfer` those of a message between stages.
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
        """The rank that sets the pace and the seconds, without a message of data parallelism."""
        return self._of(self.base)

    def among(self, gathers: Waits) -> tuple[RankLayers, float]:
        """Return the slowest rank and the seconds where microbatches wait for such messages."""
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
    """The paces of cores in their schedules; cached."""

    def __init__(self, setting: CostInputs, prices: Prices) -> None:
        self._setting, self._prices = setting, prices
        # By core: the limit that they are below, and the schedules that are not.
        self._known: dict[Layout, tuple[float, list[Pace], Counter[str]]] = {}

    def below(
        self, core: Core, orders: Sequence[Schedule], limit: float
    ) -> tuple[list[Pace], Counter[str]]:
        """Return the paces of a core below a limit, and how many schedules have none, by reason.

        They are without a message of data parallelism, and thus the same for each sharding.
        """
        layout, layers, count = core.layout, self._setting.model.n_layers, core.microbatches
        known = self._known.get(layout)
        if known is not None and limit <= known[0]:
            return known[1:]
        transfer = transfer_seconds(self._prices.kernels, layout, work_of(self._setting, layout))
        paces, slow = list[Pace](), Counter[str]()
        is_fixed = not self._prices.pins.keys().isdisjoint(OF_SCHEDULE)
        for order in orders:
            reason = None if is_fixed else dominated(order, layers, layout.pp)
            if reason is None:
                pace = self.pace(layout, order, count, transfer)
                if pace.plain[1] < limit:
                    paces.append(pace)
                    continue
            slow[reason or "slower"] += 1
        self._known[layout] = limit, paces, slow
        return paces, slow

    def pace(self, core_layout: Layout, schedule: Schedule, count: int, transfer: float) -> Pace:
        """Return the pace of a core in a schedule of so many microbatches."""
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
    """Return the smallest idle time of a pipeline over its legal schedules, as a share of its work.

    Its ranks are equally fast, and its messages take no time.
    """
    of_one = (
        closed_form(order.name, pp, order.virtual, microbatches, 1.0, pp, 0.0, 0.0)
        for order in schedules(pp, layers, microbatches)
    )
    return min(of_one, default=float(microbatches)) / microbatches - 1
