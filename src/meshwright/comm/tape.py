"""`Tape`: everything that a rank records in its flight recorder during one step, with the times.

A flight recorder holds the current activity; a tape that is attached to it keeps the history. No
torch here: the tape's clock defines times.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol


class Clock(Protocol):
    """Stamps moments cheaply, and converts the stamps to times afterwards."""

    def stamp(self) -> Any:
        """Return this moment, or None if it isn't on the compute stream."""

    def seconds(self, stamp: Any) -> float:
        """Return a stamp in seconds of the host's monotonic clock."""


class HostClock:
    """The monotonic clock, which the processes of a machine share."""

    def stamp(self) -> float:
        """Return this moment."""
        return time.monotonic()

    def seconds(self, stamp: float) -> float:
        """Return a stamp as it is."""
        return stamp


class Turn(NamedTuple):
    """An action of the rank's table or a phase of the step, and when it began."""

    name: str
    stage: int
    microbatch: int
    at: Any

    def __str__(self) -> str:
        return self.name if self.stage < 0 else f"{self.name} {self.stage} {self.microbatch}"


class Sent(NamedTuple):
    """A message that the rank began, and in which turn; `group` is its number in the recorder."""

    kind: str
    group: int
    bytes: int
    turn: int


class Wait(NamedTuple):
    """A wait of the rank for some messages, by their entries in the flight recorder."""

    entries: tuple[int, ...]
    since: Any
    until: Any


class Tape:
    """A rank's step: its turns, its messages, and its waits."""

    def __init__(self, clock: Clock | None = None) -> None:
        """Begin to listen, by the host's clock unless another one is given."""
        self.clock: Clock = clock or HostClock()
        self.turns: list[Turn] = []
        self.sent: dict[int, Sent] = {}
        self.waits: list[Wait] = []
        self._open: dict[tuple[int, ...], Any] = {}
        self.began = self.ended = self.clock.stamp()

    def turn(self, name: str, stage: int, microbatch: int) -> None:
        """Record that the rank begins something."""
        self.turns.append(Turn(name, stage, microbatch, self.clock.stamp()))

    def begin(self, entry: int, kind: str, group: int, size: int, *, waits: bool) -> None:
        """Record that a message of some bytes begins; `waits`: the rank waits for it at once."""
        self.sent[entry] = Sent(kind, group, size, len(self.turns) - 1)
        if waits:
            self.wait(entry)

    def wait(self, *entries: int) -> None:
        """Record that the rank begins to wait."""
        self._open[entries] = self.clock.stamp()

    def end(self, *entries: int) -> None:
        """Record that it no longer waits, if it did."""
        since = self._open.pop(entries, None)
        until = self.clock.stamp() if since is not None else None
        if until is not None:
            self.waits.append(Wait(entries, since, until))

    def stop(self) -> None:
        """Record the end of the step."""
        self.ended = self.clock.stamp()
