"""Events: one JSON object per line, and their destinations."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from meshwright.errors import ConfigError
from meshwright.files import FULL, open_own
from meshwright.program.events import Event
from meshwright.spec.training import LogSpec

# Seconds for which another process may hold the lock of a file: it writes a line meanwhile.
_LOCKED_S: Final = 5.0

Emit = Callable[[Event], None]


class Sink(Protocol):
    """A destination of events."""

    def write(self, event: Event) -> None:
        """Write one event."""

    def close(self) -> None:
        """Flush and close."""


class JsonLines:
    """`events.jsonl`: every event, one per line, at once, so that a reader can follow.

    Rank 0 and the supervisor append to the same file: each writer holds its lock. The partial line
    of a killed process is cut off. If the disk is full, lines are kept until there is space; `say`
    is called when this begins and when it is over.
    """

    def __init__(self, path: Path, say: Callable[[str], None] | None = None) -> None:
        """Open the file; raises as `open_own` does."""
        self._path, self._say = path, say or note
        self._kept: list[bytes] = []
        self._file = os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)
        with self._locked():
            content = path.read_bytes()
            if not content.endswith(b"\n"):
                self._file.truncate(content.rfind(b"\n") + 1)

    def write(self, event: Event) -> None:
        """Append one event; a non-finite number becomes a string, as JSON has none.

        Raises `OSError` if the disk refuses for another reason than being full.
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
        """Write the events that found no space, as far as there is some now."""
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
        """Keep others from writing meanwhile, where the file system has locks.

        Of a line that has found too little room, what was written is cut off again: a line that
        another process had written since would go with it. One that was stopped meanwhile keeps
        nobody waiting for long.
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
        """Write a line, or nothing of it; returns whether it is written."""
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
        """Close the file; reports how many events are missing if there was no space to the end."""
        self.catch_up()
        self._file.close()
        if self._kept:
            self._say(f"{self._path} lacks the last {len(self._kept)} events: the disk is full")


def append_event(path: Path, event: Event) -> None:
    """Append one event to a run's, beside whoever writes there."""
    lines = JsonLines(path)
    lines.write(event)
    lines.close()


def note(text: str) -> None:
    """Print a note to the log of this process, which may be on a full disk itself."""
    with contextlib.suppress(OSError):
        print(f"note: {text}", file=sys.stderr, flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class _Scalars:
    """The numbers of step and evaluation events, handed to a writer of scalars."""

    def __init__(
        self,
        name: str,
        write: Callable[[Mapping[str, float], int], None],
        close: Callable[[], None],
    ) -> None:
        self._name, self._write, self._close = name, write, close
        self._is_lost = False

    def write(self, event: Event) -> None:
        """Pass on the numbers of a step or an evaluation."""
        kind = event["event"]
        if kind in ("step", "eval"):
            numbers = {
                f"{'train' if kind == 'step' else 'eval'}/{key}": float(value)
                for key, value in event.items()
                if isinstance(value, int | float) and key != "step"
            }
            self._try(lambda: self._write(numbers, int(event["step"])))

    def close(self) -> None:
        """Let the writer end."""
        self._try(self._close)

    def _try(self, do: Callable[[], None]) -> None:
        """Do what the writer may fail at: a full disk or a server is no reason to end a run."""
        if self._is_lost:
            return
        try:
            do()
        except Exception as error:
            self._is_lost = True
            note(f"{self._name} gets no more numbers, which events.jsonl has: {error}")


def open_sinks(log: LogSpec, folder: Path, config: Mapping[str, Any]) -> list[Sink]:
    """Return a run's sinks; trackers record `config`.

    Raises `ConfigError` naming the extra to install if a tracker's package is missing.
    """
    sinks: list[Sink] = [JsonLines(folder / "events.jsonl")]
    if log.tensorboard:
        sinks.append(_tensorboard(folder))
    for name, project in (("wandb", log.wandb), ("trackio", log.trackio)):
        if project is not None:
            sinks.append(_tracker(name, project, folder, config))
    return sinks


def _tensorboard(folder: Path) -> Sink:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(_missing("tensorboard")) from None
    writer = SummaryWriter(folder / "tensorboard")

    def write(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return _Scalars("tensorboard", write, writer.close)


def _tracker(name: str, project: str, folder: Path, config: Mapping[str, Any]) -> Sink:
    """Return W&B or trackio, whose interfaces are the same."""
    try:
        tracker = __import__(name)
    except ImportError:
        raise ConfigError(_missing(name)) from None
    options = {"dir": str(folder)} if name == "wandb" else {}
    tracker.init(project=project, name=folder.name, config=dict(config), **options)
    return _Scalars(
        name, lambda numbers, step: tracker.log(dict(numbers), step=step), tracker.finish
    )


def _missing(extra: str) -> str:
    return f"log.{extra} is set, but {extra} is not installed: pip install 'meshwright[{extra}]'"
