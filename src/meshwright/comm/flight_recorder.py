"""A rank's activity in a small mapped file that others can read while the rank hangs.

Recording is a store to memory: no system call, no lock, nothing that could wait. The file outlives
the rank, however it ended. Doesn't import torch; `comm.collective_recorder` records the
collectives.
"""

from __future__ import annotations

import errno
import itertools
import json
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from meshwright.comm.flight_recorder_file import (
    ACTIONS,
    COUNTS_AT,
    GROUPS,
    HEAD,
    KINDS,
    MAGIC,
    NAMES_AT,
    NOW,
    NOW_AT,
    PHASES,
    RECORD,
    RECORD_TIMES,
    RING_AT,
    SIZE,
    SLOTS,
    TRANSFERS,
    Group,
    ranges_of,
)
from meshwright.comm.interfaces import machine_id
from meshwright.comm.tape import Tape
from meshwright.files import FULL

_TIME: Final = struct.Struct("=d")
_PHASE_OF: Final = {"F": "forward", "SEND_F": "forward", "RECV_F": "forward"}


class FlightRecorder:
    """The flight recorder of this process; in private memory until `open` maps a file.

    `on_phase` is called with each phase and step as it begins, so that tests can act there. While a
    `tape` is set, it also receives everything that is recorded. `clock` gives the recorded times in
    seconds.
    """

    def __init__(
        self,
        memory: mmap.mmap | None = None,
        *,
        rank: int = 0,
        world: int = 1,
        attempt: int = 0,
        on_phase: Callable[[str, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = mmap.mmap(-1, SIZE) if memory is None else memory
        self._on_phase, self._clock = on_phase, clock
        self.tape: Tape | None = None
        self._moves, self._number = 0, 0
        self._numbers = itertools.count(1)
        self._step, self._phase, self._place = 0, 0, (0, 0, 0)
        self._waited_s, self._stepped_s, self._step_began = 0.0, 0.0, 0.0
        self._sequences: dict[tuple[int, int, int], int] = {}
        self._groups: list[Group] = []
        self._started: tuple[int, ...] | None = None
        # Makes a mark on a device behind all that it was handed; the result says if it is there.
        self.mark: Callable[[], Callable[[], bool]] | None = None
        self._on_device: dict[int, Callable[[], bool]] = {}  # entries, in their order
        self._mine = threading.local()  # entries of each thread: saving has one of its own
        head = (MAGIC, attempt, rank, world, machine_id(), os.getpid(), self._clock())
        HEAD.pack_into(self._memory, 0, *head)
        self._enter("start")

    @classmethod
    def open(
        cls,
        path: Path,
        rank: int,
        world: int,
        attempt: int = 0,
        on_phase: Callable[[str, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> FlightRecorder:
        """Start the recorder of a rank in a new file.

        If the disk is full, reuses the file of an earlier attempt, which has its space. Raises
        `OSError` if there is none, or if the disk refuses for another reason.
        """
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)  # of a rank that was killed, or a link
        try:
            memory = _mapped(temporary, os.O_CREAT | os.O_EXCL)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno not in FULL or not path.is_file():
                raise
            temporary, memory = path, _mapped(path, os.O_NOFOLLOW)
        recorder = cls(memory, rank=rank, world=world, attempt=attempt, clock=clock)
        temporary.replace(path)
        # Only now, when others can read where the rank is: what acts there may take long.
        recorder._on_phase = on_phase
        recorder._enter("start")
        return recorder

    @property
    def place(self) -> str:
        """The step and phase that this rank is in."""
        return f"step {self._step}, {PHASES[self._phase]}"

    def step(self, step: int) -> None:
        """Record the beginning of a step."""
        time_s = self._clock()
        if self._step_began:
            self._stepped_s += time_s - self._step_began
        self._step, self._step_began = step, time_s
        self._enter("data")

    def phase(self, name: str) -> None:
        """Record the beginning of a phase, one of `PHASES`."""
        self._enter(name)

    def beat(self) -> None:
        """Record activity of the rank where nothing else would."""
        self._move()

    def saving(self, place: str, step: int) -> None:
        """Record progress of a save, maybe in parallel with training, and call `on_phase`.

        `place` is empty if the save has only written some more.
        """
        self._move()
        if place and self._on_phase is not None:
            self._on_phase(f"save.{place}", step)

    def action(self, kind: str, stage: int, microbatch: int) -> None:
        """Record an action of the pipeline; a forward or a backward is also its phase."""
        place = (ACTIONS.index(kind), stage, microbatch)
        is_step = PHASES[self._phase] != "eval"
        self._enter(_PHASE_OF.get(kind, "backward") if is_step else "eval", place)

    def _enter(self, name: str, place: tuple[int, int, int] = (0, 0, 0)) -> None:
        self._phase, self._place = PHASES.index(name), place
        self._move()
        if self.tape is not None:
            action, stage, microbatch = place
            self.tape.turn(ACTIONS[action] or name, stage if action else -1, microbatch)
        if self._on_phase is not None:
            self._on_phase(name, self._step)

    def _move(self) -> None:
        self._moves += 1
        action, stage, microbatch = self._place
        NOW.pack_into(
            self._memory,
            NOW_AT,
            *(self._moves, self._clock(), self._step, self._phase, action, stage, 0),
            *(microbatch, 0, self._waited_s, self._stepped_s),
        )

    def renumber(self, started: Sequence[int]) -> None:
        """Forget all groups and messages; from here on, record ranks by the numbers that they were
        started with.

        `started` has these numbers, by the ranks in the process groups that follow.
        """
        self._started = tuple(started)
        self._groups, self._sequences = [], {}
        self._memory[COUNTS_AT : COUNTS_AT + 8 * GROUPS] = bytes(8 * GROUPS)
        self._memory[RING_AT : RING_AT + SLOTS * RECORD.size] = bytes(SLOTS * RECORD.size)

    def _numbered(self, rank: int) -> int:
        return rank if self._started is None or rank < 0 else self._started[rank]

    def group(self, name: str, ranks: Sequence[int], label: str = "") -> int:
        """Return the recorder's number of a process group, given torch's name; `label` is for
        people.

        A known group keeps its number, and its label unless a new one is given.
        """
        number = next((i for i, known in enumerate(self._groups) if known.name == name), None)
        if number is None:
            number = len(self._groups)
            ranks = [self._numbered(rank) for rank in ranks]
            self._groups.append(Group(name, f"ranks {', '.join(map(str, ranks))}", tuple(ranks)))
        elif not label:
            return number
        if label:
            self._groups[number] = self._groups[number]._replace(label=label)
        texts = [[known.name, known.label, ranges_of(known.ranks)] for known in self._groups]
        text = json.dumps(texts[:GROUPS]).encode()
        if len(text) <= RING_AT - NAMES_AT - 4:
            self._memory[NAMES_AT + 4 : NAMES_AT + 4 + len(text)] = text
            struct.pack_into("=I", self._memory, NAMES_AT, len(text))
        return number

    def begin(
        self, kind: str, group: int, size: int, peer: int = -1, *, waits: bool = False
    ) -> int:
        """Record that a collective, send or receive of `size` bytes begins, and return its entry.

        `peer` is the other rank of a send or receive. `waits`: the rank waits for it at once.
        """
        code = KINDS.index(kind)
        number = self._number = next(self._numbers)
        if not hasattr(self._mine, "entries"):
            self._mine.entries = deque(maxlen=2)
        self._mine.entries.append(number)
        time_s = self._clock()
        key = (group, code, peer) if kind in TRANSFERS else (group, 0, -1)
        sequence = self._sequences[key] = self._sequences.get(key, 0) + 1
        if key[1] == 0 and group < GROUPS:
            struct.pack_into("=Q", self._memory, COUNTS_AT + 8 * group, sequence)
        RECORD.pack_into(
            self._memory,
            RING_AT + number % SLOTS * RECORD.size,
            *(number, time_s, time_s if waits else 0.0, 0.0),
            *(size, sequence, self._step, group, self._numbered(peer), code, self._phase),
        )
        self._move()
        if self.tape is not None:
            self.tape.begin(number, kind, group, size, waits=waits)
        return number

    def label(self, group: int) -> str:
        """Return the label of a group, given its number: an axis, or its ranks."""
        return self._groups[group].label

    def begun_last(self, count: int) -> tuple[int, ...]:
        """Return the last `count` entries that this thread began; empty if nothing records them."""
        return tuple(self._mine.entries)[-count:] if hasattr(self._mine, "entries") else ()

    def wait(self, *entries: int) -> None:
        """Record that the rank waits for messages, given by their entries."""
        time_s = self._clock()
        for entry in entries:
            self._stamp(entry, "waiting", time_s)
        self._move()
        if self.tape is not None:
            self.tape.wait(*entries)

    def end(self, *entries: int) -> None:
        """Record that messages have ended, and waits for them too.

        With a `mark`, they were only enqueued on the device: `look` records their ends there.
        """
        time_s, field = self._clock(), "ended"
        if self.mark is not None and entries:
            reached, field = self.mark(), "waiting"
            self._on_device.update(dict.fromkeys(entries, reached))
        since = min(
            (self._stamp(entry, field, time_s) or time_s for entry in entries), default=time_s
        )
        self._waited(entries, time_s - since)

    def look(self) -> None:
        """Record which messages have ended on the device; from any thread, also while the rank
        hangs.

        A device reaches its marks in order. This is not an activity of the rank, so the entry count
        stays.
        """
        for entry, reached in self._on_device.copy().items():
            if not reached():
                break
            self._stamp(entry, "ended", self._clock())
            self._on_device.pop(entry, None)

    def go_on(self, *entries: int) -> None:
        """Record that the rank no longer waits for messages, although they have not ended."""
        time_s = self._clock()
        since = min(
            (self._stamp(entry, "waiting", 0.0) or time_s for entry in entries), default=time_s
        )
        self._waited(entries, time_s - since)

    def _waited(self, entries: Sequence[int], seconds: float) -> None:
        self._waited_s += seconds
        self._move()
        if self.tape is not None:
            self.tape.end(*entries)

    def _stamp(self, entry: int, field: str, time_s: float) -> float:
        """Set a time of an entry, and return since when the rank waited for it; 0 if it did not."""
        if entry <= self._number - SLOTS:  # written over meanwhile
            return 0.0
        offset = RING_AT + entry % SLOTS * RECORD.size
        since = float(_TIME.unpack_from(self._memory, offset + RECORD_TIMES["waiting"])[0])
        _TIME.pack_into(self._memory, offset + RECORD_TIMES[field], time_s)
        return since

    def left_open(self) -> tuple[int, ...]:
        """Return the entry of the last collective that this thread began if it has not ended, else
        ()."""
        for entry in self.begun_last(1):
            fields = RECORD.unpack_from(self._memory, RING_AT + entry % SLOTS * RECORD.size)
            is_open = not fields[3] and entry not in self._on_device
            if is_open and KINDS[fields[9]] not in TRANSFERS:
                return (entry,)
        return ()


class Pending:
    """Sends and receives in flight, whose waits and ends are recorded."""

    def __init__(self, recorder: FlightRecorder, *works: Any) -> None:
        """Take torch's works for the messages that this thread began last."""
        self._recorder, self._works = recorder, works
        self._entries = recorder.begun_last(len(works))

    def wait(self) -> None:
        """Wait until all are completed."""
        self._recorder.wait(*self._entries)
        for work in self._works:
            work.wait()
        self._recorder.end(*self._entries)

    def is_completed(self) -> bool:
        """Whether all are completed; records their ends if so."""
        done = all(work.is_completed() for work in self._works)
        if done:
            self._recorder.end(*self._entries)
        return done


def _mapped(path: Path, flags: int) -> mmap.mmap:
    """Open a recorder's file with additional open `flags`, fill it with zeros, and map it."""
    with os.fdopen(os.open(path, os.O_RDWR | flags, 0o644), "r+b", buffering=0) as file:
        # Written, not only sized: a store to a page that the full disk lacks ends the process.
        if (written := file.write(bytes(SIZE))) < SIZE:
            raise OSError(errno.ENOSPC, f"only {written} of {SIZE} bytes were written", str(path))
        return mmap.mmap(file.fileno(), SIZE)
