"""Disk usage of runs and prepared data, and their removal. Does not import torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from meshwright.checkpoint.commit import steps
from meshwright.errors import ConfigError
from meshwright.runtime.supervise.attempts import read_word
from meshwright.runtime.supervise.lock import RunLock, read_holder, refused
from meshwright.spec.stored import steps_folder
from meshwright.training.run_folder import RunFolder
from meshwright.units import counted

# Of a cache folder, what the data's room makes again when it is missing. Measurements are small.
PREPARED: Final = {"stores": "a prepared corpus", "downloads": "a download"}


class DiskEntry(NamedTuple):
    """A removable folder or file: its bytes on disk, and when it was last changed or used.

    `time` is in seconds since 1970. `in_use` says who uses it; such an entry is never removed.
    """

    path: Path
    bytes: int
    time: float
    about: str
    in_use: str = ""


def runs_of(root: Path) -> list[DiskEntry]:
    """Return the runs in a folder, newest first; raises `ConfigError` if it does not exist.

    Other contents of the folder are ignored.
    """
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder of runs; log.dir says where they are")
    folders = [RunFolder(path) for path in root.iterdir() if not path.is_symlink()]
    entries = [
        _run(folder) for folder in folders if folder.plan.is_file() and folder.config.is_file()
    ]
    return sorted(entries, key=lambda entry: -entry.time)


def _run(folder: RunFolder) -> DiskEntry:
    checkpoints = steps_folder(folder.path)
    stay = "" if checkpoints == folder.checkpoints else f"; steps in {checkpoints} stay"
    if isinstance(checkpoints, Path):
        about = f"{counted(len(steps(checkpoints)), 'step')} saved{stay}"
    else:  # not asked: a list of folders needs no network
        about = f"steps in {checkpoints} stay"
    last = folder.events if folder.events.is_file() else folder.plan
    return DiskEntry(folder.path, size_of(folder.path), last.stat().st_mtime, about, _user(folder))


def _user(folder: RunFolder) -> str:
    """Return a phrase on the process that writes to a run, or "" if none does."""
    holder = read_holder(folder.lock)
    is_elsewhere = holder is not None and holder["host"] != socket.gethostname()
    if is_elsewhere or _is_locked(folder.lock):
        return refused(folder.lock, holder).partition(" is ")[2]
    return ""


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def prepared_in(cache: Path) -> list[DiskEntry]:
    """Return the prepared stores and downloads in a cache folder, most recently used first."""
    folders = [cache / name for name in PREPARED if (cache / name).is_dir()]
    paths = [path for folder in folders for path in folder.iterdir() if not path.is_symlink()]
    mapped = dict(_mapped(paths))
    entries = [_prepared(path, mapped.get(path, "")) for path in paths]
    return sorted(entries, key=lambda entry: -entry.time)


def _prepared(path: Path, user: str) -> DiskEntry:
    stats = [file.lstat() for file in (path, *path.rglob("*"))]
    used = max(max(stat.st_mtime, stat.st_atime) for stat in stats[1:] or stats)
    if not user and _is_locked(path / ".lock"):
        user = "in use: it is being prepared"
    return DiskEntry(path, size_of(path), used, PREPARED[path.parent.name], user)


def _mapped(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield (folder, user) for each process that maps a file of one of these folders.

    `user` names the process in words.
    """
    names = {f"{path.resolve()}/": path for path in paths}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended, or is somebody else's
            continue
        for name, path in names.items():
            if name in text:
                yield path, f"in use by process {maps.parent.name}"


def size_of(path: Path) -> int:
    """Return the disk usage of a file or folder in bytes; symbolic links are not followed."""
    return sum(file.lstat().st_blocks * 512 for file in (path, *path.rglob("*")))


class DiskSelection(NamedTuple):
    """Which entries to remove: all but the newest `keep`, if older than `age_s` seconds.

    None means that a criterion does not apply.
    """

    keep: int | None = None
    age_s: float | None = None

    def of(self, entries: Sequence[DiskEntry], unix_time: float | None = None) -> list[DiskEntry]:
        """Return the entries to remove, given newest first; none if both criteria are None.

        Entries in use are never selected.
        """
        if self.keep is None and self.age_s is None:
            return []
        before = (time.time() if unix_time is None else unix_time) - (self.age_s or 0.0)
        old = entries[self.keep or 0 :]
        return [entry for entry in old if not entry.in_use and entry.time <= before]


def remove(entries: Iterable[DiskEntry]) -> Iterator[tuple[DiskEntry, str]]:
    """Remove entries, yielding each with an error message, empty on success."""
    for entry in entries:
        problem = ""
        try:
            with contextlib.ExitStack() as stack:
                folder = RunFolder(entry.path)
                if folder.plan.is_file():  # nobody begins to go on with it now
                    stack.enter_context(RunLock(folder.lock))
                # Renamed first: half of a run must not look like one.
                renamed = entry.path.with_name(f".removed-{entry.path.name}-{uuid.uuid4().hex[:8]}")
                entry.path.rename(renamed)
                renamed.unlink() if renamed.is_file() else shutil.rmtree(renamed)
        except (OSError, ConfigError) as error:
            problem = str(error)
        yield entry, problem


def forget_gone(root: Path) -> None:
    """Remove references to deleted runs: the link `latest`, and records of restarted jobs."""
    latest = root / "latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink()
    for note in root.glob(".job-*"):
        word = read_word(note)
        if word is not None and not Path(word.folder).exists():
            note.unlink(missing_ok=True)
