"""Events: one JSON object per line, and their destinations."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from meshwright.errors import ConfigError
from meshwright.files import FULL, open_own
from meshwright.program.events import Event
from meshwright.spec.training import LogSpec
from meshwright.training.sinks import TRACKERS, Opened, trackers_of
from meshwright.training.sinks.base import TrackedRun

# Seconds for which another process may hold the lock of a file: it writes a line meanwhile.
_LOCKED_S: Final = 5.0

Emit = Callable[[Event], None]


class Sink(Protocol):
    """A destination of events, such as a file or an experiment tracker."""

    def write(self, event: Event) -> None:
        """Write one event."""

    def close(self) -> None:
        """Flush and close."""


class JsonLines:
    """`events.jsonl`: each event is appended as one line at once, so that a reader can follow.

    Rank 0 and the supervisor append to the same file, each under its lock. The partial line of a
    killed process is removed. If the disk is full, lines are kept in memory until there is space;
    `say` is called with a message when this begins and when it is over.
    """

    def __init__(self, path: Path, say: Callable[[str], None] | None = None) -> None:
        """Open the file for appending; raises as `open_own` does."""
        self._path, self._say = path, say or note
        self._kept: list[bytes] = []
        self._file = os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)
        with self._locked():
            content = path.read_bytes()
            if not content.endswith(b"\n"):
                self._file.truncate(content.rfind(b"\n") + 1)

    def write(self, event: Event) -> None:
        """Append one event; a non-finite number becomes a string, since JSON has none.

        Raises `OSError` for any disk error but a full disk.
        """
        was_full = bool(self._kept)
        self._kept.append(json.dumps(_finite(event)).encode() + b"\n")
        self._catch_up(was_full)
        if self._kept and not was_full:
            self._say(
                f"{self._path} cannot be written, the disk is full; the run continues, and its "
                "events are written once there is room"
            )

    def catch_up(self) -> None:
        """Write the events kept in memory, as far as there is space now."""
        if self._kept:
            self._catch_up(was_full=True)

    def _catch_up(self, was_full: bool) -> None:
        count = len(self._kept)
        with self._locked():
            while self._kept and self._append(self._kept[0]):
                self._kept.pop(0)
        if was_full and not self._kept:
            self._say(f"{self._path} can be written again; it has all events, {count} of them late")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Within this context, lock the file against other writers, if the file system has locks.

        A line that found too little space is removed by truncation, which must not remove a line
        that another process has written since. A process that was stopped while it has the lock
        delays others by a few seconds at most: then they continue without it.
        """
        deadline = time.monotonic() + _LOCKED_S
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.01)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _append(self, line: bytes) -> bool:
        """Write a line completely or not at all; return whether it was written."""
        try:
            written = self._file.write(line)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return False
        if written < len(line):
            self._file.truncate(os.fstat(self._file.fileno()).st_size - written)
        return written == len(line)

    def close(self) -> None:
        """Close the file; report how many events are missing if the disk is still full."""
        self.catch_up()
        self._file.close()
        if self._kept:
            self._say(f"{self._path} lacks the last {len(self._kept)} events: the disk is full")


class Callbacks:
    """A sink that writes each event to another sink, then passes it to a user's functions.

    A function that raises does not end the run: a note names it, and it gets no more events.
    """

    def __init__(self, sink: Sink, callbacks: Iterable[Emit]) -> None:
        self._sink, self._callbacks = sink, list(callbacks)

    def write(self, event: Event) -> None:
        """Write the event and call the functions in their order."""
        self._sink.write(event)
        for callback in tuple(self._callbacks):
            try:
                callback(dict(event))
            except Exception as error:
                self._callbacks.remove(callback)
                name = getattr(callback, "__qualname__", type(callback).__name__)
                note(
                    f"the callback {name} is not called again, the run continues: "
                    f"{type(error).__name__}: {error}"
                )

    def close(self) -> None:
        """Close the wrapped sink."""
        self._sink.close()


def append_event(path: Path, event: Event) -> None:
    """Append one event to the `events.jsonl` of a run that other processes may be writing."""
    lines = JsonLines(path)
    lines.write(event)
    lines.close()


def note(text: str) -> None:
    """Print a note to stderr; errors of a full disk are ignored."""
    with contextlib.suppress(OSError):
        print(f"note: {text}", file=sys.stderr, flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class _Scalars:
    """A sink that passes the numbers of step and eval events to an experiment tracker."""

    def __init__(self, name: str, tracker: Opened) -> None:
        self._name, self._tracker = name, tracker
        self._is_lost = False

    def write(self, event: Event) -> None:
        """Pass on the numbers of a step or eval event; ignore other events."""
        kind = event["event"]
        if kind in ("step", "eval"):
            numbers = {
                f"{'train' if kind == 'step' else 'eval'}/{key}": float(value)
                for key, value in event.items()
                if isinstance(value, int | float) and key != "step"
            }
            self._try(lambda: self._tracker.write(numbers, int(event["step"])))

    def close(self) -> None:
        """Close the tracker's record."""
        self._try(self._tracker.close)

    def _try(self, do: Callable[[], None]) -> None:
        """Call `do`; after its first exception, note it and ignore the tracker from then on."""
        if self._is_lost:
            return
        try:
            do()
        except Exception as error:
            self._is_lost = True
            note(f"{self._name} gets no more numbers, which events.jsonl has: {error}")


def open_sinks(log: LogSpec, run: TrackedRun) -> list[Sink]:
    """Return a run's sinks: `events.jsonl`, and the trackers that `log` names.

    Raises `ConfigError` naming the extra to install if a tracker's package is missing.
    """
    sinks: list[Sink] = [JsonLines(run.folder / "events.jsonl")]
    for name in trackers_of(log):
        try:
            tracker = TRACKERS[name](replace(run, setting=getattr(log, name)))
        except ImportError:
            raise ConfigError(without_package(name)) from None
        sinks.append(_Scalars(name, tracker))
    return sinks


def without_package(tracker: str) -> str:
    """Return the error message for a tracker whose package is not installed."""
    return (
        f"log.{tracker} is set, but {tracker} is not installed: pip install 'meshwright[{tracker}]'"
    )
