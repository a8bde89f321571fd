"""`Watchdog`: reads the flight recorders of running ranks, and reports hangs and slow ranks.

It runs in the supervisor, so no rank can prevent it from looking. No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from meshwright.comm.flight_recorder_file import FlightRecorderFile, RankPace
from meshwright.runtime.supervise.explain import explain, witnesses
from meshwright.training.run_folder import RunFolder
from meshwright.units import format_seconds

# Steps over which the waits of ranks are compared.
WINDOW: Final = 8
# Until all ranks have begun, they are given at least these seconds: they import torch.
_BEGIN_S: Final = 120.0
# The share of those steps that all others wait, at least, where one rank is said to be slow.
_WAITED_FOR: Final = 0.5


class Hang(NamedTuple):
    """Ranks without activity: why, and for how many seconds."""

    cause: str
    silent_s: float


class Watchdog:
    """Watches the ranks of one attempt; with `hang_s` 0, it reports no hangs.

    `clock` is that of the flight recorders, in seconds.
    """

    def __init__(
        self,
        folder: RunFolder,
        world: int,
        hang_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._world, self._hang_s = folder, world, hang_s
        self._clock = clock
        self._files: dict[int, FlightRecorderFile] = {}
        self._moves = [0] * world
        self._moved_at = clock()
        self._before: list[RankPace] | None = None

    def look(self, pids: Sequence[int]) -> Hang | None:
        """Read the flight recorders; returns why the ranks hang, if they do."""
        self._map()
        moves = [self._files[r].moves if r in self._files else 0 for r in range(self._world)]
        clock_s = self._clock()
        if moves != self._moves:
            self._moves, self._moved_at = moves, clock_s
        silent = clock_s - self._moved_at
        has_begun = len(self._files) == self._world
        limit = self._hang_s if has_begun else max(self._hang_s, _BEGIN_S)
        if not self._hang_s or silent < limit:
            return None
        explanation = explain(witnesses(self._folder, self._world, pids), clock_s)
        return Hang(
            f"no rank has done anything for {format_seconds(silent)}: {explanation}", silent
        )

    def _map(self) -> None:
        for rank in range(self._world):
            if rank not in self._files and (path := self._folder.flight_recorder(rank)).is_file():
                try:
                    self._files[rank] = FlightRecorderFile(path)
                except (OSError, ValueError):  # being written
                    continue

    def slow(self) -> dict[str, Any] | None:
        """Return the event of a rank for which all others waited over the last steps, if any."""
        if len(self._files) < self._world or self._world < 2:
            return None
        paces = [self._files[rank].pace() for rank in range(self._world)]
        if min(pace.step for pace in paces) < 2:  # the first one begins when all have loaded
            return None
        if self._before is None:
            self._before = paces
        before = self._before
        if min(p.step for p in paces) - min(p.step for p in before) < WINDOW:
            return None
        self._before = paces
        return _slow_event(before, paces)


def _slow_event(before: Sequence[RankPace], latest: Sequence[RankPace]) -> dict[str, Any] | None:
    shares = []
    for old, new in zip(before, latest, strict=True):
        seconds = new.stepped_s - old.stepped_s
        shares.append((new.waited_s - old.waited_s) / seconds if seconds > 0 else 0.0)
    rank = min(range(len(shares)), key=shares.__getitem__)
    least_wait = min(share for other_rank, share in enumerate(shares) if other_rank != rank)
    if least_wait < _WAITED_FOR or shares[rank] > least_wait / 2:
        return None
    return {
        "event": "slow_rank",
        "time": time.time(),
        "rank": rank,
        "from_step": before[rank].step,
        "step": latest[rank].step,
        "others_wait": least_wait,
        "waits": shares[rank],
    }
