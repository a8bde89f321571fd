"""`Prices`: what parts of layouts cost, kept from one search to the next of the same setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshwright.layout import Layout
from meshwright.predict.memory import KeptBytes, kept_of
from meshwright.predict.microbatch import MicrobatchTimes, parts_of
from meshwright.predict.setting import Setting
from meshwright.search.sharded import Shardings
from meshwright.search.space import Pins

# Settings of which prices are kept: those that a person goes back and forth between.
_MOST: Final = 4


class Prices:
    """Prices of parts that are the same in all batches and numbers of microbatches.

    Those are a microbatch's seconds and bytes, and what the ZeRO stages of a division cost.
    """

    def __init__(self, setting: Setting, pins: Pins) -> None:
        self.setting, self.pins = setting, pins
        self.kernels = setting.kernels()
        self.shardings = Shardings(setting, self.kernels, pins)
        self._times: dict[tuple[object, ...], MicrobatchTimes] = {}
        self._kept: dict[tuple[object, ...], KeptBytes] = {}

    def parts(self, layout: Layout, defers: bool = False) -> MicrobatchTimes:
        """Return the seconds of a layout's microbatch; few of its choices change them.

        `defers`: its schedule has the gradients of weights wait.
        """
        key = (*shape_of(layout), defers)
        if key not in self._times:
            self._times[key] = parts_of(self.setting, self.kernels, layout)
        return self._times[key]

    def kept_of(self, layout: Layout) -> KeptBytes:
        """Return what a layout's microbatch keeps: see `predict.memory.kept_of`."""
        key = shape_of(layout)
        if key not in self._kept:
            self._kept[key] = kept_of(self.setting, layout)
        return self._kept[key]


class KnownPrices:
    """The prices of the last few settings that were asked for."""

    def __init__(self) -> None:
        self._last: list[Prices] = []

    def of(self, setting: Setting, pins: Pins) -> Prices:
        """Return the prices of a setting, whatever its batch is, and of such fixed keys."""
        batch = setting.train.batch
        for one in self._last:
            own = one.setting
            train = own.train.model_copy(update={"batch": batch})
            if one.pins == pins and replace(own, train=train) == setting:
                return one
        self._last = [Prices(setting, pins), *self._last[: _MOST - 1]]
        return self._last[0]


def shape_of(layout: Layout) -> tuple[object, ...]:
    """Return what a microbatch's work depends on."""
    one = layout
    return one.tp, one.sp, one.cp, one.cp_kind, one.ep, one.microbatch, one.recompute
