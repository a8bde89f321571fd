"""`Saver`: the ranks of a run write a step together, synchronously or during training.

During training, a thread copies what this rank writes while the next forward and backward run:
these change no weights, so only the update has to wait for the copy. Then the thread writes to the
disk; it uses a separate process group, because two threads must not use collectives of one group.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.commit import (
    Fingerprint,
    begin,
    claim,
    is_there,
    old_steps,
    point,
    purge,
    read_manifest,
    remove,
    seal,
    step_name,
    verify,
)
from meshwright.checkpoint.staging import Staging
from meshwright.checkpoint.state import OPTIMIZER, WEIGHTS, Chunks
from meshwright.checkpoint.tensors import Chunk, write_chunks
from meshwright.comm.world import World, exchange
from meshwright.errors import CheckpointError
from meshwright.files import FULL
from meshwright.spec.stored import BEST
from meshwright.store import Place, place


class Saved(NamedTuple):
    """A committed step: its path, its size in bytes, and the seconds from the call to the commit.

    `stall_s` are the seconds that training waited for it.
    """

    step: int
    path: Place
    bytes: int
    seconds: float
    stall_s: float


class Saver:
    """Saves the steps of one run under `root`, keeping the newest `keep` and the best.

    Every rank creates one and makes the same calls; `on_saved` receives each committed step, in the
    training thread.
    """

    def __init__(
        self,
        root: Place,
        world: World,
        keep: int,
        on_saved: Callable[[Saved], None],
        *,
        run: str = "",
        during_training: bool = False,
        mark: Callable[[str, int], None] = lambda moment, step: None,
        timeout_s: float = 600.0,
    ) -> None:
        """Create `root` and a process group for saves.

        `run` is the id of the run that saves; `mark` is called with each progress mark and the
        step.
        """
        self._root, self._world, self._keep, self._mark = root, world, keep, mark
        self.run = run
        if world.rank == 0:
            with contextlib.suppress(OSError):  # the first save tells
                root.mkdir(parents=True, exist_ok=True)
        self._on_saved, self._beside = on_saved, during_training
        self.group = None
        if world.size > 1:
            timeout = datetime.timedelta(seconds=timeout_s)
            self.group = dist.new_group(backend="gloo", timeout=timeout)
        self._buffers: dict[str, Tensor] = {}
        on_gpu = during_training and world.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        self._staging: Staging | None = None
        if on_gpu:
            self._stream = torch.cuda.Stream(world.device)  # type: ignore[no-untyped-call]
            self._staging = Staging(self._stream)
        self._running: _Running | None = None
        self._writer: str | None = None  # of a store, from this process's first save on

    def save(
        self, step: int, chunks: Chunks, facts: Mapping[str, Any], texts: Mapping[str, str]
    ) -> None:
        """Save a step, or with `during_training` start to; waits for the previous save.

        `facts` go into the manifest; `texts` are the contents of further files by name. Raises
        `CheckpointError` on every rank if one of them could not write.
        """
        self.finish()
        started = time.perf_counter()
        running = _Running(step)
        # On a GPU the copies come after what it has been given so far, and beside all that follows.
        ready = None if self._stream is None else torch.cuda.current_stream().record_event()

        def work() -> None:
            try:
                if self._beside:
                    with self._beside_training(ready):
                        written = Chunks(*map(self._copied, chunks))
                    running.copied.set()
                else:
                    written = chunks
                running.path, running.bytes = self._write(step, written, facts, texts)
            except BaseException as error:
                running.error = error
            finally:
                running.copied.set()
                running.seconds = time.perf_counter() - started

        self._running = running
        if self._beside:
            running.thread = threading.Thread(target=work, name=f"save-{step}", daemon=True)
            running.thread.start()
            running.stall_s = time.perf_counter() - started
        else:
            work()
            running.stall_s = running.seconds
            self.finish()

    def keep_best(self, step: int) -> None:
        """Mark a step as the best, if it is saved, so that it is not removed; a collective.

        Waits for its save. The previous best step may then be removed.
        """
        self.finish()

        def appoint() -> str:
            if self._world.rank > 0 or not is_there(self._root / step_name(step)):
                return ""
            point(self._root, BEST, step_name(step))
            return "purge" if old_steps(self._root, self._keep) else ""

        if self._together(appoint)[0]:
            self._remove_old(step)

    def before_update(self) -> None:
        """Wait until a running save has copied what the update will change."""
        if self._running is not None and not self._running.copied.is_set():
            started = time.perf_counter()
            self._running.copied.wait()
            self._running.stall_s += time.perf_counter() - started

    def poll(self) -> None:
        """Report a save whose thread has ended; does not wait for others."""
        running = self._running
        if running is not None and running.thread is not None and not running.thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait for a running save and report it; raise its error if it failed."""
        running, self._running = self._running, None
        if running is None:
            return
        if running.thread is not None:
            started = time.perf_counter()
            running.thread.join()
            running.stall_s += time.perf_counter() - started
        if running.error is not None:
            raise running.error
        assert running.path is not None
        self._on_saved(
            Saved(running.step, running.path, running.bytes, running.seconds, running.stall_s)
        )

    def abandon(self) -> None:
        """Wait for a running save that fails, because its process group is closed."""
        running, self._running = self._running, None
        if running is not None and running.thread is not None:
            running.thread.join()

    @contextmanager
    def _beside_training(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """Within this context, run copies on a separate GPU stream, after the event `ready`."""
        if self._stream is None or self._staging is None or ready is None:
            yield
            return
        # A thread begins with the first GPU, and would open a context of half a GB there.
        torch.cuda.set_device(self._world.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            yield
            self._staging.finish()

    def _copied(self, chunks: list[Chunk]) -> list[Chunk]:
        """Copy chunks to host buffers, which all saves reuse."""
        copies = []
        for name, offsets, tensor in chunks:
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
                self._buffers[name] = buffer
            if self._staging is not None and tensor.is_cuda:
                self._staging.copy(tensor, buffer)
            else:
                buffer.copy_(tensor)
            copies.append(Chunk(name, offsets, buffer))
        return copies

    def _write(
        self, step: int, chunks: Chunks, facts: Mapping[str, Any], texts: Mapping[str, str]
    ) -> tuple[Place, int]:
        """Write this rank's files and, on rank 0, commit the step; returns path and all bytes."""
        rank = self._world.rank

        def mark(moment: str) -> None:
            self._mark(moment, step)

        mark("begin")

        final = self._root / step_name(step)
        temporary = self._together(lambda: self._begun(step))[0]
        if not temporary:  # committed already, by this very run
            return final, _bytes_of(read_manifest(final)["files"])
        folder = place(temporary)

        def write() -> str:
            if isinstance(folder, Path) and not folder.is_dir():
                raise CheckpointError(
                    f"{folder} is not on rank {rank}'s machine: checkpoint.dir must be shared"
                )
            files: dict[str, Fingerprint] = {}
            for kind, kind_chunks in ((WEIGHTS, chunks.weights), (OPTIMIZER, chunks.optimizer)):
                if kind_chunks:
                    name = f"{kind}-{rank:05d}.safetensors"
                    files[name] = write_chunks(folder / name, kind_chunks, mark)
            return json.dumps(files)

        try:
            everyone = self._together(write)
        except CheckpointError:
            if rank == 0:  # the disk may be full of it
                with contextlib.suppress(OSError):
                    remove(folder)
            raise
        files = {
            name: Fingerprint(*entry)
            for text in everyone
            for name, entry in json.loads(text).items()
        }

        def commit() -> str:
            if rank == 0:
                writer = self._writer or ""
                seal(folder, step, files, {**facts, "run": self.run}, mark, writer, texts)
                return "purge" if old_steps(self._root, self._keep) else ""
            return ""

        if self._together(commit)[0]:
            self._remove_old(step)
        return final, sum(file.bytes for file in files.values())

    def _begun(self, step: int) -> str:
        """Return on rank 0 where a step's files go; empty if they are committed, or elsewhere."""
        if self._world.rank > 0:
            return ""
        if self._writer is None:
            self._writer = claim(self._root, self.run)
        return str(begin(self._root, step, self.run) or "")

    def _remove_old(self, step: int) -> None:
        """Verify the step just saved, then remove steps that need not be kept."""
        self._together(lambda: self._verify(self._root / step_name(step)))
        self._mark("purge", step)
        if self._world.rank == 0:
            purge(self._root, self._keep)

    def _verify(self, folder: Place) -> str:
        """Verify this rank's share of a step's files."""
        verify(folder, lambda index: index % self._world.size == self._world.rank)
        return ""

    def _together(self, work: Callable[[], str]) -> list[str]:
        """Run `work` on all ranks and return all results; an error on one rank is raised on all."""
        try:
            answer = "=" + work()
        except (CheckpointError, OSError) as error:
            answer = f"!{error}{_more_room(error)}"
        everyone = exchange(answer, self.group)
        for rank, text in enumerate(everyone):
            if text.startswith("!"):
                raise CheckpointError(f"rank {rank}: {text[1:]}")
        return [text[1:] for text in everyone]


def _more_room(error: BaseException) -> str:
    """Return advice for a full disk, or "" for other errors."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in FULL:
        return ""
    return (
        ". The disk is full: free some space, or save elsewhere with checkpoint.dir=FOLDER, and "
        "resume the run"
    )


def _bytes_of(files: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the total bytes of the tensor files that a manifest lists."""
    kinds = (f"{WEIGHTS}-", f"{OPTIMIZER}-")
    return sum(file["bytes"] for name, file in files.items() if name.startswith(kinds))


class _Running:
    """The state of a save in progress."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.copied = threading.Event()
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.path: Place | None = None
        self.bytes, self.seconds, self.stall_s = 0, 0.0, 0.0
