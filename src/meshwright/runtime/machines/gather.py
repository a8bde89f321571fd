"""The run folder of ranks on several nodes: shared by all nodes, or gathered at the end.

A node that cannot access rank 0's folder creates one under the same path. The files of its ranks
are sent to rank 0 through the rendezvous store, at the end or after a failure. Does not import
torch: the store is an argument.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO, cast

from meshwright.checkpoint.commit import LOCK
from meshwright.comm.flight_recorder_file import SIZE
from meshwright.errors import ConfigError, refusal
from meshwright.files import open_own, write_atomic
from meshwright.store import StorePath
from meshwright.training.run_folder import Job, RunFolder

if TYPE_CHECKING:  # a supervisor never needs torch
    from meshwright.comm.world import World

# Of a log its end is sent; a flight recorder is sent whole. The store keeps all of it in memory.
_LONGEST: Final = 256 * 1024
_LOOK_S: Final = 3.0  # file systems over a network show new folders late
_END_S: Final = 30.0  # for what other nodes send when all has gone well
_FAILED_S: Final = 5.0  # and after a failure, where some of them may be gone


class KeyValueStore(Protocol):
    """The methods of torch's rendezvous stores that are used here."""

    def set(self, key: str, value: str) -> None:
        """Store a text under a key."""

    def get(self, key: str) -> bytes:
        """Return the value stored under a key."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all of the keys exist."""


def hand_over(job: Job) -> str:
    """Return, as JSON, what rank 0 sends to the other ranks: its folder, locks, config and plan."""
    # A store needs no look: whoever can't reach it says so at the start of a save.
    locks = [job.folder.lock, job.checkpoints / LOCK]
    seen = {str(path): path.read_text(encoding="utf-8") for path in locks if isinstance(path, Path)}
    texts = {
        path.name: path.read_text(encoding="utf-8") for path in (job.folder.config, job.folder.plan)
    }
    announcement = {"folder": str(job.folder.path), "seen": seen, "texts": texts}
    return json.dumps({**announcement, "in_store": isinstance(job.checkpoints, StorePath)})


def sight(announcement: Mapping[str, Any]) -> list[bool]:
    """Return whether this node can access rank 0's run folder, and its checkpoint folder.

    `announcement` is the parsed result of `hand_over`. Waits some seconds, since network file
    systems show new folders late.
    """
    until = time.monotonic() + _LOOK_S
    while True:
        visible = [_reads(Path(path), text) for path, text in announcement["seen"].items()]
        if all(visible) or time.monotonic() > until:
            # One file where steps are saved into the run folder, or a store.
            return [visible[0], visible[-1] or bool(announcement.get("in_store"))]
        time.sleep(0.1)


def _reads(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except OSError:
        return False


def check_sights(
    announcement: Mapping[str, Any], sights: Iterable[tuple[str, Sequence[bool]]]
) -> None:
    """Raise `ConfigError` if a node cannot access rank 0's checkpoint folder.

    `sights` has each rank's node name and the result of its `sight`. Every rank writes its part of
    a step and rank 0 commits it, so all of them need one folder.
    """
    blind = sorted({node for node, (_, checkpoints) in sights if not checkpoints})
    if blind:
        path = Path(list(announcement["seen"])[-1]).parent
        problem = f"{', '.join(blind)} cannot see {path}, into which rank 0's node saves"
        legal = ["log.dir on a file system of all nodes", "checkpoint.dir on one"]
        raise ConfigError(refusal(problem, legal=legal))


def make_copy(announcement: Mapping[str, Any]) -> None:
    """Create a run folder with rank 0's config and plan on a node that cannot access rank 0's."""
    folder = Path(announcement["folder"])
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for name, text in announcement["texts"].items():
        write_atomic(folder / name, text.encode())


@dataclass(frozen=True)
class Gathering:
    """Sends the files of ranks that have another run folder than rank 0 to rank 0.

    `apart` are the numbers of these ranks.
    """

    store: KeyValueStore
    folder: RunFolder
    apart: tuple[int, ...]

    def send(self, rank: int) -> None:
        """Send this rank's log, flight record and failure; ignores a store that is gone."""
        contents = {}
        for path in (
            self.folder.log(rank),
            self.folder.flight_recorder(rank),
            self.folder.failure(rank),
        ):
            with contextlib.suppress(OSError):
                content = path.read_bytes()[-max(_LONGEST, SIZE) :]
                contents[path.name] = base64.b64encode(content).decode()
        with contextlib.suppress(Exception):  # the store is gone with rank 0
            self.store.set(f"left/{rank}", json.dumps(contents))

    def collect(self, *, is_failure: bool) -> list[int]:
        """Write the files received so far into rank 0's folder; returns ranks that sent none.

        Called by rank 0 only; waits for a limited time, which is shorter after a failure.
        """
        missing = list(self.apart)
        until = time.monotonic() + (_FAILED_S if is_failure else _END_S)
        while missing and time.monotonic() < until:
            with contextlib.suppress(Exception):  # the store has been lost, or the disk is full
                for rank in [sender for sender in missing if self.store.check([f"left/{sender}"])]:
                    for name, text in json.loads(self.store.get(f"left/{rank}")).items():
                        write_atomic(self.folder.path / "logs" / name, base64.b64decode(text))
                    missing.remove(rank)
            if missing:
                time.sleep(0.1)
        return missing


def one_folder(world: World, announcement: Mapping[str, Any]) -> Gathering:
    """Return the `Gathering` of the ranks, after creating a run folder on nodes without rank 0's.

    All ranks must call this together. Raises `ConfigError` on every rank if they have no common
    checkpoint folder.
    """
    own_sight = sight(announcement)
    sights = [
        [bool(seen) for seen in row] for row in world.gather_on_host([float(s) for s in own_sight])
    ]
    check_sights(announcement, [(world.node(rank), seen) for rank, seen in enumerate(sights)])
    if not own_sight[0]:
        make_copy(announcement)
    apart = tuple(rank for rank, seen in enumerate(sights) if not seen[0])
    return Gathering(
        cast(KeyValueStore, world.store), RunFolder(Path(announcement["folder"])), apart
    )


class _Tee:
    """A text stream that also writes to a log."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        """Write the text to the stream and the log."""
        with contextlib.suppress(OSError, ValueError):  # a full disk does not end a run
            self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def logged(path: Path, *, stdout: bool) -> Iterator[None]:
    """Write what this process prints to a log file as well, for the duration of the context.

    The log includes stacks after a crash. Without `stdout` it has stderr only, because rank 0 shows
    the run on stdout.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ["stdout", "stderr"] if stdout else ["stderr"]
    before = {name: getattr(sys, name) for name in names}
    descriptor = open_own(path, os.O_WRONLY | os.O_APPEND)
    log = os.fdopen(descriptor, "a", encoding="utf-8", buffering=1)
    for name, stream in before.items():
        setattr(sys, name, _Tee(stream, log))
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc(file=log)
        raise
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
        for name, stream in before.items():
            setattr(sys, name, stream)
        with contextlib.suppress(OSError):  # what the disk has had no room for
            log.close()
