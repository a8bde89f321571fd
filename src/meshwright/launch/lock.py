"""`RunLock`: one run at a time writes into a run folder. No torch here."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError


class RunLock:
    """The right to write into a run folder, as a context.

    The system holds the lock and lets go of it when the last process that has the file open is
    gone, however it went: a lock that is left behind stops nobody. Ranks get the open file, so that
    the folder of a supervisor that was killed stays locked for as long as one of them runs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.descriptor = -1
        self.left_by: dict[str, Any] | None = None  # who held it last and did not let go of it

    def __enter__(self) -> RunLock:
        """Take the lock; raises `ConfigError` with who holds it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = read_holder(self._path)
            os.close(self.descriptor)
            if isinstance(error, BlockingIOError):
                raise ConfigError(refused(self._path, holder)) from None
            raise ConfigError(f"{self._path} cannot be locked: {error.strerror}") from None
        self.left_by = read_holder(self._path)
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time()}
        self._write(json.dumps(mine))
        return self

    def _write(self, text: str) -> None:
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text.encode(), 0)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._write("")
        os.close(self.descriptor)


def read_holder(path: Path) -> dict[str, Any] | None:
    """Return pid, host and time of whoever took a lock and has not let go of it."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def refused(path: Path, holder: dict[str, Any] | None) -> str:
    """Word the refusal of a folder that is in use."""
    text = f"run folder {path.parent} is in use"
    if holder is None:
        return f"{text} by another process"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["time"]))
    who = f"process {holder['pid']} on {holder['host']}"
    if holder["host"] == socket.gethostname() and not Path(f"/proc/{holder['pid']}").exists():
        return f"{text} by a rank that {who}, gone since, started after {since}"
    return f"{text} by {who} since {since}"
