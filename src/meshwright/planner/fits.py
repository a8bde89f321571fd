"""`Fits`: whether layouts fit: by estimate during a search, by their price at its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshwright.cost.inputs import CostInputs
from meshwright.cost.memory import KeptBytes
from meshwright.cost.price import (
    Prediction,
    RankMemory,
    brief,
    price,
    worst_estimate,
    worst_memory,
)
from meshwright.layout import Layout

# Below this share of the limit a closed form, some percent off, is not looked into.
_SURE: Final = 0.9

# Share of the time that each further word of a layout's label, or stage, has to earn. Predictions
# are a few percent off, so of layouts that are about as fast the simplest is the one to run.
_WORD = 0.002


def preference(prediction: Prediction) -> float:
    """Return the ranking value of a layout: its seconds, plus a little for complexity.

    Each word of the label and each additional stage per rank counts as complexity.
    """
    layout = prediction.layout
    effort = len(layout.label.split()) + layout.virtual_stages - 1
    return prediction.time.total * (1 + _WORD * effort)


class Fits:
    """The memory of layouts compared with a limit in bytes; caches known values."""

    def __init__(self, setting: CostInputs, limit: float) -> None:
        self.setting, self.limit = setting, limit
        self._estimates: dict[Layout, RankMemory] = {}
        self._exact: dict[Layout, RankMemory] = {}
        self._timed: dict[Layout, Prediction] = {}

    def estimate(self, layout: Layout, kept_bytes: KeptBytes | None = None) -> RankMemory:
        """Return the approximate bytes of a layout's largest rank; exact if already priced.

        `kept_bytes` is the layout's `kept_of`, if the caller knows it.
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
        """Return the price of a layout, with its memory only estimated."""
        if layout not in self._timed:
            memory = self.estimate(layout)
            self._timed[layout] = price(self.setting, layout, worst=memory)
        return self._timed[layout]

    def priced(self, timed: Prediction) -> Prediction:
        """Return the price of a timed layout, with exact memory from now on."""
        layout = timed.layout
        if layout not in self._exact:
            self._exact[layout] = worst_memory(self.setting, layout)
        return replace(timed, memory=self._exact[layout])
