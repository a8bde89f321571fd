"""`Tape`: everything that a rank records in its flight recorder during one step, with the times.

A flight recorder holds the present activity; a tape that is attached to it stores the history.
Doesn't import torch: the tape's clock defines times.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol


class Clock(Protocol):
    """Stamps moments cheaply, and converts the stamps to times afterwards."""

    def stamp(self) -> Any:
        """Return a stamp of this moment, or None if it isn't on the compute stream."""

    def seconds(self, stamp: Any) -> float:
        """Return the time of a stamp in seconds of the host's monotonic clock."""


class HostClock:
    """The host's monotonic clock, which the processes of a machine share."""

    def stamp(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def seconds(self, stamp: float) -> float:
        """Return the stamp itself, which is in seconds."""
        return stamp


class Turn(NamedTuple):
    """An action of the rank's table or a phase of the step, with the stamp of its beginning.

    `stage` is -1 for a phase.
    """

    name: str
    stage: int
    microbatch: int
    at: Any

    def __str__(self) -> str:
        return self.name if self.stage < 0 else f"{self.name} {self.stage} {self.microbatch}"


class Sent(NamedTuple):
    """A message that the rank began; `group` is its number in the recorder, `turn` the index of its
    turn."""

    kind: str
    group: int
    bytes: int
    turn: int


class Wait(NamedTuple):
    """A wait for some messages, given by their entries in the flight recorder, with stamps."""

    entries: tuple[int, ...]
    since: Any
    until: Any


class Tape:
    """The record of a rank's step: its actions and phases (turns), its messages, and its waits."""

    def __init__(self, clock: Clock | None = None) -> None:
        """Begin the record of a step, by the host's clock unless another one is given."""
        self.clock: Clock = clock or HostClock()
        self.turns: list[Turn] = []
        self.sent: dict[int, Sent] = {}
        self.waits: list[Wait] = []
        self._open: dict[tuple[int, ...], Any] = {}
        self.began = self.ended = self.clock.stamp()

    def turn(self, name: str, stage: int, microbatch: int) -> None:
        """Record that an action or phase begins."""
        self.turns.append(Turn(name, stage, microbatch, self.clock.stamp()))

    def begin(self, entry: int, kind: str, group: int, size: int, *, waits: bool) -> None:
        """Record that a message of `size` bytes begins; `waits`: the rank waits for it at once."""
        self.sent[entry] = Sent(kind, group, size, len(self.turns) - 1)
        if waits:
            self.wait(entry)

    def wait(self, *entries: int) -> None:
        """Record that the rank begins to wait for messages, given by their entries."""
        self._open[entries] = self.clock.stamp()

    def end(self, *entries: int) -> None:
        """Record that the rank no longer waits for these messages, if it did."""
        since = self._open.pop(entries, None)
        until = self.clock.stamp() if since is not None else None
        if until is not None:
            self.waits.append(Wait(entries, since, until))

    def stop(self) -> None:
        """Record the end of the step."""
        self.ended = self.clock.stamp()
