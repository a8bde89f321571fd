"""Noticing that the loss has jumped. No torch here."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

WINDOW: Final = 50
LEAST: Final = 20  # steps before anything is called unusual
FACTOR: Final = 10.0  # of the median absolute deviation: ten times what a step usually differs


class SpikeWatch:
    """Tells a loss that is far above those of the last steps; `usual` is their median."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)
        self.usual = float("nan")

    def is_spike(self, loss: float) -> bool:
        """Take in a step's loss in nats; true where it stands out, or is no number."""
        found = loss != loss
        if len(self._last) >= LEAST:
            self.usual = statistics.median(self._last)
            spread = statistics.median(abs(one - self.usual) for one in self._last)
            found = found or loss - self.usual > FACTOR * max(spread, 1e-3 * abs(self.usual))
        if not found:  # one spike must not make the next one usual
            self._last.append(loss)
        return found
