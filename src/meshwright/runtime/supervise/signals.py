"""`StopSignals`: SIGINT, SIGTERM and SIGHUP as requests to stop. No torch here."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Final

# A signal that comes sooner after another says the same: of a key that is held down, of a shell
# and a job's supervisor that both pass one on.
_APART_S: Final = 0.5


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask to stop: not SIGHUP where it is ignored, as under nohup."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


class StopSignals:
    """A context that handles signals as requests to stop.

    `asked`: there was one. `repeats` counts further Ctrl-Cs.
    """

    def __init__(self) -> None:
        self.asked, self.repeats = False, 0
        self._last = 0.0

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._ask) for number in stop_signals()}
        return self

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        clock_s = time.monotonic()
        is_apart, self._last = clock_s - self._last >= _APART_S, clock_s
        if self.asked and is_apart and signum == signal.SIGINT:
            self.repeats += 1
        self.asked = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
