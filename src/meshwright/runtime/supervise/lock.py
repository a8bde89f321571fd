"""`RunLock`: only one run at a time writes to a run folder or checkpoint folder.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, RankFailed
from meshwright.files import open_own, read_text
from meshwright.parsing import parse_json


class RunLock:
    """The exclusive right to write to a folder, as a context manager; the lock file names the run.

    The system holds the lock (flock) until the last process with the open file ends, however it
    ends, so no stale lock remains. Ranks inherit the open file, so the folder of a killed
    supervisor stays locked as long as one of them runs.
    """

    def __init__(self, path: Path, run: str = "", folder_kind: str = "run folder") -> None:
        self._path, self._run, self._what = path, run, folder_kind
        self.descriptor = -1
        self.left_by: dict[str, Any] | None = None  # the last holder, if not released

    def __enter__(self) -> RunLock:
        """Take the lock; raises `ConfigError` naming its holder, or if the file is a link."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.descriptor = open_own(self._path, os.O_RDWR)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be locked: {error.strerror}") from None
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = read_holder(self._path)
            os.close(self.descriptor)
            if isinstance(error, BlockingIOError):
                raise ConfigError(refused(self._path, holder, self._what)) from None
            raise ConfigError(f"{self._path} cannot be locked: {error.strerror}") from None
        self.left_by = read_holder(self._path)
        own_entry = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time()}
        own_entry["run"] = self._run
        self._write(json.dumps(own_entry))
        return self

    def _write(self, text: str) -> None:
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text.encode(), 0)

    @property
    def is_lost(self) -> bool:
        """Whether the locked file has been removed or replaced, as with a deleted folder."""
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self.descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a file system that does not answer says nothing
            return False

    def check(self) -> None:
        """Raise `RankFailed` if the locked file has been removed or replaced."""
        if self.is_lost:
            raise RankFailed(
                f"{self._what} {self._path.parent} was removed or replaced while the run wrote "
                "into it. The run ends: what it has not saved elsewhere is lost"
            )

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._write("")
        os.close(self.descriptor)


def read_holder(path: Path) -> dict[str, Any] | None:
    """Return the pid, host and time of a lock's holder; None if it has been released."""
    try:
        entry = parse_json(read_text(path))
        time.localtime(entry["time"])
        return {"pid": int(entry["pid"]), "host": str(entry["host"]), "time": entry["time"]}
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError):
        return None


def refused(path: Path, holder: dict[str, Any] | None, folder_kind: str = "run folder") -> str:
    """Return a message that a folder is in use, and by which process."""
    text = f"{folder_kind} {path.parent} is in use"
    if holder is None:
        return f"{text} by another process"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["time"]))
    process = f"process {holder['pid']} on {holder['host']}"
    if holder["host"] == socket.gethostname() and not Path(f"/proc/{holder['pid']}").exists():
        return f"{text} by a rank that {process}, gone since, started after {since}"
    return f"{text} by {process} since {since}"
