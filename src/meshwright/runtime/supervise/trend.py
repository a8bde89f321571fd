"""The trend of a run's loss: a sparkline of the last steps, and their slope."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import fmean, linear_regression
from typing import Final

# Logged steps that are looked back on, columns of the sparkline, steps that make a trend.
_BACK, _COLUMNS, _LEAST = 200, 40, 5
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_ASCII: Final = "_.-=+*#@"


class Trend:
    """The last losses, as text: a column is the mean of a few steps, low marks are low losses."""

    def __init__(self, *, is_ascii: bool = False) -> None:
        self._marks = _ASCII if is_ascii else _BLOCKS
        self._points: deque[tuple[int, float]] = deque(maxlen=_BACK)

    def clear(self) -> None:
        """Forget the losses."""
        self._points.clear()

    def add(self, step: int, loss: float | str) -> None:
        """Add a step; a non-finite loss, which events have as text, has no trend."""
        if not isinstance(loss, str) and math.isfinite(loss):
            self._points.append((step, loss))

    @property
    def text(self) -> str:
        """The sparkline, and nats per 100 steps by least squares; empty after only a few steps."""
        if len(self._points) < _LEAST:
            return ""
        steps, losses = zip(*self._points, strict=True)
        slope = linear_regression(steps, losses).slope
        return f"{self._line(losses)}  {slope * 100:+.3f} nats per 100 steps"

    def _line(self, losses: tuple[float, ...]) -> str:
        count = min(len(losses), _COLUMNS)
        ends = [len(losses) * column // count for column in range(count + 1)]
        means = [fmean(losses[a:b]) for a, b in pairwise(ends)]
        low, high = min(means), max(means)
        scale = (len(self._marks) - 1) / (high - low) if high > low else 0.0
        return "".join(self._marks[round((mean - low) * scale)] for mean in means)
