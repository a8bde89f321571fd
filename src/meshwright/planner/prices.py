"""`Prices`: the prices of parts of layouts, cached across searches of the same setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshwright.cost.inputs import CostInputs
from meshwright.cost.memory import KeptBytes, kept_of
from meshwright.cost.microbatch import MicrobatchTimes, TimesOfParts
from meshwright.layout import Layout
from meshwright.planner.sharded import Shardings
from meshwright.planner.space import Pins

# Settings of which prices are kept: those that a person goes back and forth between.
_MOST: Final = 4


class Prices:
    """Prices that don't depend on the batch or the number of microbatches.

    These are the seconds and bytes of a microbatch, and the costs of the ZeRO stages of a division.
    """

    def __init__(self, setting: CostInputs, pins: Pins) -> None:
        self.setting, self.pins = setting, pins
        self.kernels = setting.kernels()
        self.shardings = Shardings(setting, self.kernels, pins)
        self._of_parts = TimesOfParts(setting, self.kernels)
        self._times: dict[tuple[object, ...], MicrobatchTimes] = {}
        self._kept: dict[tuple[object, ...], KeptBytes] = {}

    def parts(self, layout: Layout, defers: bool = False) -> MicrobatchTimes:
        """Return the seconds of a layout's microbatch, which depend on few of its choices.

        `defers`: the schedule defers weight gradients.
        """
        key = (*shape_of(layout), defers)
        if key not in self._times:
            self._times[key] = self._of_parts.of(layout)
        return self._times[key]

    def least_parts(self, layout: Layout) -> MicrobatchTimes:
        """Return `parts` without recomputation, which are the least of a layout's microbatch."""
        *shape, _, moves = shape_of(layout)
        key = (*shape, "none", moves, False)
        if key not in self._times:
            self.parts(layout.model_copy(update={"recompute": "none"}))
        return self._times[key]

    def kept_of(self, layout: Layout) -> KeptBytes:
        """Return the bytes that a layout's microbatch keeps: see `cost.memory.kept_of`."""
        key = shape_of(layout)
        if key not in self._kept:
            self._kept[key] = kept_of(self.setting, layout)
        return self._kept[key]


class KnownPrices:
    """A cache of the prices of the most recent settings."""

    def __init__(self) -> None:
        self._last: list[Prices] = []

    def of(self, setting: CostInputs, pins: Pins) -> Prices:
        """Return the prices of a setting with these fixed keys, for any batch."""
        batch = setting.train.batch
        for known in self._last:
            known_setting = known.setting
            train = known_setting.train.model_copy(update={"batch": batch})
            if known.pins == pins and replace(known_setting, train=train) == setting:
                known.shardings.setting = (
                    setting  # weights on the host are sent for each microbatch
                )
                return known
        self._last = [Prices(setting, pins), *self._last[: _MOST - 1]]
        return self._last[0]


def shape_of(layout: Layout) -> tuple[object, ...]:
    """Return the choices that determine a microbatch's work."""
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
