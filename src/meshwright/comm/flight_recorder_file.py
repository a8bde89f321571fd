"""The file of a rank's flight recorder: its format, and a reader for other processes. No torch."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from meshwright.parsing import parse_json
from meshwright.units import KIB, format_bytes

PHASES: Final = (
    "start",
    "load",
    "data",
    "forward",
    "backward",
    "reduce",
    "update",
    "eval",
    "save",
    "end",
    "log",
)
ACTIONS: Final = ("", "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
_DETAILS: Final = {
    "I": ", for its inputs",
    "W": ", for its weights",
    "SEND_F": ", sending what comes out",
    "RECV_F": ", asking for what goes in",
    "SEND_B": ", sending the gradient of what went in",
    "RECV_B": ", asking for the gradient of what came out",
}
KINDS: Final = (
    "other",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
)
TRANSFERS: Final = ("send", "recv")

MAGIC: Final = b"MWLEDG01"
HEAD: Final = struct.Struct("=8sIIIIqd")  # magic, attempt, rank, world, machine, pid, started
# moves, at, step, phase, action, stage, -, microbatch, -, waited_s, stepped_s
NOW: Final = struct.Struct("=Qdqhhhhiidd")
# number from 1, begun, waiting, ended, bytes, sequence number, step, group, peer, kind, phase
RECORD: Final = struct.Struct("=QdddqIIhhHH8x")
RECORD_TIMES: Final = {"begun": 8, "waiting": 16, "ended": 24}
NOW_AT: Final = 64
COUNTS_AT: Final = 128  # how many collectives each group has begun
GROUPS: Final = 64
NAMES_AT: Final = COUNTS_AT + 8 * GROUPS
RING_AT: Final = 16384
SLOTS: Final = 512
SIZE: Final = RING_AT + SLOTS * RECORD.size
_MOST_RANKS: Final = 2**20


class Group(NamedTuple):
    """A process group: torch's name for it, its label (an axis or another purpose), and its
    ranks."""

    name: str
    label: str
    ranks: tuple[int, ...]


class Record(NamedTuple):
    """A collective, or a send or receive, whose `peer` is the rank at the other end.

    Times are of the monotonic clock, which a machine's processes share; 0 if it has not happened.
    `sequence` counts from 1: the collectives of a group, or the transfers to or from one peer.
    """

    number: int
    begun: float
    waiting: float
    ended: float
    bytes: int
    sequence: int
    step: int
    group: Group
    peer: int
    kind: str
    phase: str

    @property
    def is_transfer(self) -> bool:
        """Whether it is a send or a receive."""
        return self.kind in TRANSFERS

    @property
    def is_waited_for(self) -> bool:
        """Whether the rank is blocked until it ends."""
        return self.waiting > 0 and not self.ended

    def __str__(self) -> str:
        text = f"{self.kind} #{self.sequence} of {self.group.label}"
        if self.is_transfer:
            text += f" {'to' if self.kind == 'send' else 'from'} rank {self.peer}"
        # To the byte, since ranks may disagree on a few of many.
        size = f"{self.bytes:,} bytes"
        return f"{text} ({size if self.bytes < KIB else f'{format_bytes(self.bytes)}, {size}'})"


class Reading(NamedTuple):
    """The contents of a flight recorder at one moment.

    `machine` is the rank's: its process id and times are meaningful only there. `moves` counts the
    entries, `at` is the time of the last one. In finished steps, the rank spent `waited_s` of
    `stepped_s` seconds waiting for other ranks and their messages.
    """

    attempt: int
    rank: int
    world: int
    pid: int
    started: float
    moves: int
    at: float
    step: int
    phase: str
    action: str
    stage: int
    microbatch: int
    waited_s: float
    stepped_s: float
    groups: tuple[Group, ...]
    counts: tuple[int, ...]
    records: tuple[Record, ...]
    machine: int = 0

    def begun(self, group: Group) -> int:
        """Return how many collectives of a group this rank has begun; -1 if unknown."""
        for known, count in zip(self.groups, self.counts, strict=False):
            if known.name == group.name and known.ranks == group.ranks:
                return count
        return -1

    def place(self) -> str:
        """Return what the rank is doing in words, such as "step 7, forward of microbatch 2 on stage
        1"."""
        if self.phase in ("start", "load", "end"):
            phrases = {
                "start": "before it joined the others",
                "load": "loading",
                "end": "at the end of the run",
            }
            return phrases[self.phase]
        text = f"step {self.step}, {self.phase}"
        if self.action:
            text += f" of microbatch {self.microbatch} on stage {self.stage}"
            text += _DETAILS.get(self.action, "")
        return text


class RankPace(NamedTuple):
    """A rank's present step, and the seconds of all steps before it: in all, and spent waiting."""

    step: int
    waited_s: float
    stepped_s: float


class FlightRecorderFile:
    """A reader of another process's flight recorder."""

    def __init__(self, path: Path) -> None:
        """Map a flight recorder's file; raises `OSError` or `ValueError` if it is missing or no
        recorder."""
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        if self._memory[:8] != MAGIC:
            raise ValueError(f"{path} is not a flight recorder's file of this version")

    @property
    def moves(self) -> int:
        """The number of recorded entries, which stops growing when the rank hangs."""
        return int(struct.unpack_from("=Q", self._memory, NOW_AT)[0])

    @property
    def part(self) -> str:
        """The part of the run that the rank is in: `setup` until its first step has ended, `save`,
        `eval`, or else `step`."""
        fields = NOW.unpack_from(self._memory, NOW_AT)
        phase = PHASES[fields[3]]
        if phase in ("save", "eval"):
            return phase
        return "step" if self.pace().stepped_s else "setup"

    def pace(self) -> RankPace:
        """Return the rank's progress, and its waiting time until then."""
        fields = NOW.unpack_from(self._memory, NOW_AT)
        return RankPace(fields[2], fields[-2], fields[-1])

    def read(self) -> Reading:
        """Return the contents of the flight recorder at this moment."""
        _, attempt, rank, world, machine, pid, started = HEAD.unpack_from(self._memory, 0)
        moves, entered, step, phase, action, stage, _, microbatch, _, waited_s, stepped_s = (
            NOW.unpack_from(self._memory, NOW_AT)
        )
        size = struct.unpack_from("=I", self._memory, NAMES_AT)[0]
        listed = parse_json(self._memory[NAMES_AT + 4 : NAMES_AT + 4 + size] or b"[]")
        groups = tuple(Group(name, label, ranks_of(ranges)) for name, label, ranges in listed)
        counts = struct.unpack_from(f"={GROUPS}Q", self._memory, COUNTS_AT)
        return Reading(
            *(attempt, rank, world, pid, started, moves, entered, step, PHASES[phase]),
            *(ACTIONS[action], stage, microbatch, waited_s, stepped_s),
            groups,
            counts[: len(groups)],
            tuple(sorted(self._records(groups))),
            machine,
        )

    def _records(self, groups: tuple[Group, ...]) -> list[Record]:
        records = []
        for slot in range(SLOTS):
            fields = RECORD.unpack_from(self._memory, RING_AT + slot * RECORD.size)
            number, begun, waiting, ended, size, sequence, step, group, peer, kind, phase = fields
            if number:
                record_group = (
                    groups[group] if group < len(groups) else Group("", f"group {group}", ())
                )
                records.append(
                    Record(
                        *(number, begun, waiting, ended, size, sequence, step, record_group, peer),
                        *(KINDS[kind], PHASES[phase]),
                    )
                )
        return records


def read_flight_recorder(path: Path) -> Reading | None:
    """Return the contents of a rank's flight recorder; None without one."""
    try:
        return FlightRecorderFile(path).read()
    except (OSError, ValueError, LookupError, TypeError, OverflowError, struct.error):
        return None  # none, or one that is damaged


def forget(path: Path) -> None:
    """Clear a recorder's file; it keeps its disk space for the next attempt.

    Removes a file of another kind.
    """
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "wb", buffering=0) as file:
            is_whole = os.fstat(file.fileno()).st_size == SIZE
            if is_whole and file.write(bytes(len(MAGIC))) == len(MAGIC):
                return
    except OSError:
        pass  # none, a link, or on a file system that has no room to write even here
    path.unlink(missing_ok=True)


def ranges_of(ranks: Sequence[int]) -> list[list[int]]:
    """Return ranks as runs `[first, last, stride]`, so that thousands of ranks fit."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and (len(run := runs[-1]) < 3 or rank - run[1] == run[2]) and rank > run[1]:
            runs[-1] = [run[0], rank, rank - run[1]]
        else:
            runs.append([rank, rank])
    return runs


def ranks_of(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks of `ranges_of`; raises `ValueError` for more than a group can have."""
    if any(not 0 <= run[0] <= run[1] < _MOST_RANKS for run in runs) or len(runs) > _MOST_RANKS:
        raise ValueError("a group of ranks that no job has")
    return tuple(
        rank
        for first, last, *stride in runs
        for rank in range(first, last + 1, stride[0] if stride else 1)
    )
