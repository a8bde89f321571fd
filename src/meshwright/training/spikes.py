"""Detects jumps of the loss. No torch here."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import pairwise
from typing import Final

WINDOW: Final = 50
LEAST: Final = 20  # steps before anything is called unusual
RECENT: Final = 9  # a loss is compared with the median of so many, since it falls over more
FACTOR: Final = 10.0  # times what one step usually differs from the next


class SpikeWatch:
    """Detects a loss far above those of the last steps; `usual` is the median of a few."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)
        self.usual = float("nan")

    def is_spike(self, loss: float) -> bool:
        """Add a step's loss in nats; true if it stands out, or is not finite."""
        spike = loss != loss
        if len(self._last) >= LEAST:
            losses = list(self._last)
            self.usual = statistics.median(losses[-RECENT:])
            change = statistics.median(abs(b - a) for a, b in pairwise(losses))
            spike = spike or loss - self.usual > FACTOR * max(change, 1e-3 * abs(self.usual))
        if not spike:  # one spike must not make the next one usual
            self._last.append(loss)
        return spike
