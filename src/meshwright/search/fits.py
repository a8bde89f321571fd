"""`Fits`: whether layouts fit, by estimates in a search, and by their price at its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshwright.layout import Layout
from meshwright.predict.memory import KeptBytes
from meshwright.predict.price import (
    Prediction,
    RankMemory,
    brief,
    price,
    worst_estimate,
    worst_memory,
)
from meshwright.predict.setting import Setting

# Below this share of the limit a closed form, some percent off, is not looked into.
_SURE: Final = 0.9

# Share of the time that each further word of a layout's label, or stage, has to earn. Predictions
# are a few percent off, so of layouts that are about as fast the simplest is the one to run.
_WORD = 0.002


def preference(found: Prediction) -> float:
    """Return what layouts are ranked by: seconds, a little more for what has to be set up.

    That is each word of the label, and each further stage on a rank.
    """
    layout = found.layout
    effort = len(layout.label.split()) + layout.virtual_stages - 1
    return found.time.total * (1 + _WORD * effort)


class Fits:
    """The memory of layouts against a limit in bytes; what is known of one is kept."""

    def __init__(self, setting: Setting, limit: float) -> None:
        self.setting, self.limit = setting, limit
        self._estimates: dict[Layout, RankMemory] = {}
        self._exact: dict[Layout, RankMemory] = {}
        self._timed: dict[Layout, Prediction] = {}

    def estimate(self, layout: Layout, kept: KeptBytes | None = None) -> RankMemory:
        """Return about what the largest rank of a layout holds; exactly, where that is known.

        `kept` is the layout's `kept_of`, where that is known.
        """
        if layout in self._exact:
            return self._exact[layout]
        if layout not in self._estimates:
            found = worst_estimate(self.setting, layout, kept)
            if _SURE * self.limit < found.total <= self.limit:
                found = brief(self.setting, layout, found.rank)
            self._estimates[layout] = found
        return self._estimates[layout]

    def timed(self, layout: Layout) -> Prediction:
        """Return the price of a layout but for its memory, which is estimated."""
        if layout not in self._timed:
            held = self.estimate(layout)
            self._timed[layout] = price(self.setting, layout, held=held)
        return self._timed[layout]

    def priced(self, timed: Prediction) -> Prediction:
        """Return the price of a layout that is timed; its memory is exact from now on."""
        layout = timed.layout
        if layout not in self._exact:
            self._exact[layout] = worst_memory(self.setting, layout)
        return replace(timed, memory=self._exact[layout])
