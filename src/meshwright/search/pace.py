"""`Pace`: what a core's microbatches take in a schedule, whatever ZeRO stage is chosen for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from meshwright.layout import Layout
from meshwright.predict.data_messages import Waits
from meshwright.predict.kernels import Kernels
from meshwright.predict.microbatch import MicrobatchTimes
from meshwright.predict.pipeline import closed_form
from meshwright.predict.step import host_seconds
from meshwright.predict.work import HeldLayers
from meshwright.search.space import Schedule


@dataclass(frozen=True, eq=False)
class Pace:
    """What the microbatches of a core take in a schedule, with the host's work for them.

    `times` counts the ranks of a pipeline by the layers that they hold, `base` has the seconds of a
    microbatch on each, `transfer` those of a message between stages.
    """

    schedule: Schedule
    layout: Layout
    count: int
    parts: MicrobatchTimes
    times: Counter[HeldLayers]
    base: dict[HeldLayers, float]
    transfer: float
    kernels: Kernels

    @cached_property
    def plain(self) -> tuple[HeldLayers, float]:
        """The rank that sets the pace and the seconds, without a message of data parallelism."""
        return self._of(self.base)

    def among(self, gathers: Waits) -> tuple[HeldLayers, float]:
        """Return the same where microbatches wait for such messages."""
        return self._of({held: each + gathers.of(held) for held, each in self.base.items()})

    def _of(self, whole: dict[HeldLayers, float]) -> tuple[HeldLayers, float]:
        kernels, count = self.kernels, self.count
        slowest = max(whole, key=whole.__getitem__)
        busy, total = count * whole[slowest], sum(n * whole[held] for held, n in self.times.items())
        order = self.schedule.name, self.layout.pp, self.schedule.virtual, count
        pipeline = closed_form(*order, whole[slowest], total, self.transfer, kernels.exposed_pp)
        waiting = kernels.idle * (pipeline - busy)
        return slowest, busy + waiting + host_seconds(kernels, count)
