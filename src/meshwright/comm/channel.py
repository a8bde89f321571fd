"""Shared-memory channels: collectives between the ranks of one machine.

gloo sends through sockets, in a thread that competes with the computation for its core. In a
channel, a rank writes its part into its own buffer and continues, and reads the parts of all ranks
when it needs the result: no thread has to run meanwhile, and each byte is copied once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.world import exchange
from meshwright.program.messages import LARGEST_SHARED

# Bytes of the largest message, and of a rank's room: those on their way must all fit.
LARGEST: Final = LARGEST_SHARED
ROOM: Final = 4 * LARGEST
# A rank's words, of 8 bytes: how many parts it has left, how many it has read, and where the last
# ones are in its room, with their bytes. Each rank has a page of its own.
_PAGE: Final = mmap.PAGESIZE
_LEFT, _READ, _PLACES, _SIZES, _TURNS = 0, 8, 16, 80, 64
_ALIGNED: Final = 64  # bytes of a cache line
_SPINS, _YIELD_S, _NAP_S, _LOOK_S = 100, 0.002, 0.00005, 0.25

# Makes a result of the parts of all ranks, by rank.
Finish = Callable[[list[Tensor]], None]


class _Due(NamedTuple):
    """A message that is not finished: its number, and the bytes, shape and dtype of each rank's
    part.

    `finish` combines the parts. `entries` are those of the message in the flight recorder.
    """

    number: int
    size: int
    shape: torch.Size
    dtype: torch.dtype
    finish: Finish
    entries: Sequence[int]


class Channel:
    """A file in shared memory with a buffer for each rank of a group, of which this rank has index
    `rank`.

    Every rank writes equally many parts, which are read in that order. `recorder` records waits for
    other ranks inside of `leave`; none is longer than `timeout_s`. Only for processors on which
    writes become visible in order, such as x86.
    """

    def __init__(
        self, file: int, rank: int, ranks: Sequence[int], timeout_s: float, recorder: FlightRecorder
    ) -> None:
        """Map an open file of `bytes_of(len(ranks))` bytes, and lock this rank's byte of it.

        `rank` is this rank's index in `ranks`, which are global ranks. The system releases the lock
        when the process ends, however it does, which is how others notice.
        """
        self._file, self._rank, self.timeout_s, self.recorder = file, rank, timeout_s, recorder
        self._ranks, size = tuple(ranks), len(ranks)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        memory = torch.frombuffer(mmap.mmap(file, bytes_of(size)), dtype=torch.uint8)
        counters = memory[: size * _PAGE].view(torch.int64).view(size, -1).numpy()
        self._words = list(counters)
        self._rooms = memory[size * _PAGE :].view(size, ROOM)
        self._next, self._at = 0, 0
        self._live: deque[tuple[int, int, int]] = deque()  # of this rank: number, start, stop
        self._due: deque[_Due] = deque()
        self._due_bytes = 0
        weakref.finalize(self, os.close, file)

    def leave(self, part: Tensor, finish: Finish, entries: Sequence[int] = ()) -> int:
        """Write this rank's part, as large as the others', and return the message's number.

        `finish` is called with the parts of all ranks, in the part's shape, when `collect` needs
        it, or earlier: pending messages use at most half of a buffer. So a rank waits here only
        until the others reach the same point, whatever they do in between. The recorder records the
        wait under the `entries` of the message.
        """
        number, part_bytes = self._next, part.numel() * part.itemsize
        assert part_bytes <= LARGEST, "a larger message goes another way"
        if self._due_bytes + part_bytes > ROOM // 2 or len(self._due) >= _TURNS // 2:
            while self._due:
                self._collect_first(self._due[0].entries)
        start = self._place(part_bytes, entries)
        self._rooms[self._rank, start : start + part_bytes].view(part.dtype).view(part.shape).copy_(
            part.detach()
        )
        counters = self._words[self._rank]
        counters[_PLACES + number % _TURNS], counters[_SIZES + number % _TURNS] = start, part_bytes
        counters[_LEFT] = number + 1  # from here on the others may read it
        self._next, self._at = number + 1, start + -(-part_bytes // _ALIGNED) * _ALIGNED
        self._live.append((number, start, self._at))
        self._due.append(_Due(number, part_bytes, part.shape, part.dtype, finish, entries))
        self._due_bytes += part_bytes
        return number

    def release(self) -> None:
        """Let the others know, as the end of this process would, that no more parts come."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._rank)

    def collect(self, number: int) -> None:
        """Finish all messages up to `number`, waiting for the other ranks' parts.

        The caller records the wait. Raises `torch.distributed.DistError` if a rank has ended or
        exceeds the time-out.
        """
        while self._due and self._due[0].number <= number:
            self._collect_first(())

    def _collect_first(self, entries: Sequence[int]) -> None:
        number, expected_bytes, shape, dtype, finish, _ = self._due.popleft()
        self._due_bytes -= expected_bytes
        self._wait(_LEFT, number, entries)
        parts = []
        for rank, (counters, room) in enumerate(zip(self._words, self._rooms, strict=True)):
            start, part_bytes = (
                int(counters[base + number % _TURNS]) for base in (_PLACES, _SIZES)
            )
            if part_bytes != expected_bytes:
                raise dist.DistError(
                    f"rank {self._ranks[rank]} left {part_bytes} bytes for a message where "
                    f"{expected_bytes} were due"
                )
            parts.append(room[start : start + expected_bytes].view(dtype).view(shape))
        finish(parts)
        self._words[self._rank][_READ] = number + 1

    def _place(self, part_bytes: int, entries: Sequence[int]) -> int:
        """Return the offset in the buffer for a part, waiting until no rank reads the memory
        there."""
        start = self._at if self._at + part_bytes <= ROOM else 0
        self._forget()
        if not self._live:
            return 0  # the same pages again, which are in the cache
        overlapping = [
            n for n, first, stop in self._live if first < start + part_bytes and start < stop
        ]
        if len(self._live) >= _TURNS:
            overlapping.append(self._live[-_TURNS][0])
        if overlapping:
            self._wait(_READ, max(overlapping), entries)
            self._forget()
        return start

    def _forget(self) -> None:
        """Forget this rank's parts that all ranks have read."""
        if self._live:
            read = min(int(counters[_READ]) for counters in self._words)
            while self._live and self._live[0][0] < read:
                self._live.popleft()

    def _late(self, word: int, number: int) -> list[int]:
        """Return the indices of ranks that have not written (`_LEFT`) or not read (`_READ`) a
        message."""
        return [rank for rank, counters in enumerate(self._words) if counters[word] <= number]

    def _wait(self, word: int, number: int, entries: Sequence[int]) -> None:
        """Wait until all ranks have written or read a message; records the wait under `entries`, if
        any."""
        for _ in range(_SPINS):
            if not self._late(word, number):
                return
        if entries:
            self.recorder.wait(*entries)
        began = looked = time.monotonic()
        while late := self._late(word, number):
            time_s = time.monotonic()
            if time_s - began < _YIELD_S:
                os.sched_yield()
                continue
            time.sleep(_NAP_S)
            if time_s - looked > _LOOK_S:
                looked = time_s
                self._look(word, number, late, time_s - began)
        if entries:
            self.recorder.go_on(*entries)

    def _look(self, word: int, number: int, late: Sequence[int], waited_s: float) -> None:
        """Raise `DistError` if a late rank has ended, or after the time-out.

        The messages use gloo's words, by which `runtime.supervise.explain` recognizes failures of
        other ranks.
        """
        for rank in late:  # never this one, which would lose its own lock
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            except OSError:
                continue  # it holds its lock
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
            if rank in self._late(word, number):  # else it ended after it had come
                raise dist.DistError(
                    f"Connection closed by peer: rank {self._ranks[rank]}, with which this one "
                    "shares memory, has ended"
                )
        if waited_s > self.timeout_s:
            whom = ", ".join(str(self._ranks[rank]) for rank in late)
            raise dist.DistError(
                f"Timed out after {waited_s:.0f} s of waiting for rank{'s'[: len(late) - 1]} "
                f"{whom}, with which this one shares memory"
            )


def bytes_of(size: int) -> int:
    """Return the size in bytes of a channel's file for `size` ranks."""
    return size * (_PAGE + ROOM)


def open_channel(
    group: dist.ProcessGroup, timeout_s: float, recorder: FlightRecorder
) -> Channel | None:
    """Return a new channel for a gloo group, or None on all its ranks if one isn't possible; a
    collective.

    The file has no name in any folder, so nothing remains of it, however the ranks end: the first
    rank creates it, and the others open it through that process.
    """
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    name = f"meshwright-{uuid.uuid4().hex}"
    file = _made(name, len(ranks)) if rank == 0 else None
    offer = "" if file is None else f"/proc/{os.getpid()}/fd/{file} {name}"
    offered = exchange(offer, group)[0]
    if rank and offered:
        file = _opened(*offered.split())
    works = exchange("" if file is None else "works", group)
    if file is None or not all(works):
        if file is not None:
            os.close(file)
        return None
    channel = Channel(file, rank, ranks, timeout_s, recorder)
    exchange("", group)  # nobody looks for a lock before all have theirs
    return channel


def _made(name: str, size: int) -> int | None:
    """Return a new anonymous file with all its memory allocated, or None if that is not
    possible."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        file = os.memfd_create(name)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, bytes_of(size))  # a page that isn't there would kill a rank
    except OSError:
        os.close(file)
        return None
    return file


def _opened(place: str, name: str) -> int | None:
    """Return a descriptor of the file `name` that another process has open at `place`.

    None if it can't be opened, or is another file: containers number processes separately.
    """
    try:
        if os.readlink(place) != f"/memfd:{name} (deleted)":
            return None
        return os.open(place, os.O_RDWR)
    except OSError:
        return None
