"""Finds uses of memory by streams without the necessary waits, like `torch.cuda._sanitizer`.

Each stream has a vector clock (doi.org/10.1145/359545.359563): up to which operation of each stream
its work comes after. A use of a tensor must come after the last write, and a write also after the
reads. Freed memory goes to the next tensor of the stream on which it was allocated, which must come
after all its uses. The host counts as a stream, too, which comes after the device work that it has
waited for.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

HOST: Final = -1
_ASIDE: Final = ("/wire.py", "/collective_recorder.py", "/flight_recorder.py")
Time = dict[int, int]  # how far each stream is


@dataclass
class _Memory:
    """A storage: the stream it was allocated on, its last write, and the reads since.

    `uses` are the last uses by stream, with their places in the code; `keepers` are the streams of
    `record_stream`.
    """

    home: int
    place: str
    written: tuple[int, int] | None = None
    reads: Time = field(default_factory=dict)
    uses: dict[int, tuple[int, str]] = field(default_factory=dict)
    keepers: set[int] = field(default_factory=set)


class StreamOrder:
    """Checks the work of streams, in the order in which the host enqueues it.

    `faults` are sentences; `waits` are the waits of the host, with their places in the code.
    """

    def __init__(self) -> None:
        self._clocks: dict[int, Time] = {HOST: {}}
        self._memory: dict[int, tuple[_Memory, weakref.ref[Any]]] = {}
        # By the stream that memory goes back to: who used it last, until when.
        self._free: dict[int, list[tuple[int, int, str]]] = {}
        self.faults: list[str] = []
        self.waits: list[str] = []

    def new_stream(self) -> int:
        """Create a stream, and return its number."""
        number = len(self._clocks) - 1
        self._clocks[number] = {number: 0}
        return number

    def now(self, stream: int) -> Time:
        """Return the vector clock of a stream."""
        return dict(self._clocks[stream])

    def everything(self) -> Time:
        """Return a vector clock that comes after all work of all streams."""
        return {number: clock.get(number, 0) for number, clock in self._clocks.items()}

    def wait(self, stream: int, until: Time) -> None:
        """Make later work on a stream come after the vector clock `until`."""
        clock = self._clocks[stream]
        for number, count in until.items():
            clock[number] = max(clock.get(number, 0), count)

    def host_waits(self, cause: str, until: Time) -> None:
        """Make the host wait until a vector clock, and record it as a blocking wait."""
        self.waits.append(f"{cause} at {place()}")
        self.wait(HOST, until)

    def keep(self, tensor: Any, stream: int) -> None:
        """Keep a tensor's memory from reuse until the work of a stream is done
        (`record_stream`)."""
        self._of(tensor, HOST).keepers.add(stream)

    def use(self, stream: int, reads: Iterable[Any], writes: Iterable[Any], name: str) -> None:
        """Record an operation on a stream with the tensors that it reads and writes, and check
        it."""
        clock, where = self._clocks[stream], f"{name} at {place()}"
        if stream != HOST:  # it is the host that hands it to the device
            self.wait(stream, {HOST: self._clocks[HOST].get(HOST, 0)})
        clock[stream] = tick = clock.get(stream, 0) + 1
        for tensor in reads:
            memory = self._of(tensor, stream)
            self._ask(memory, stream, memory.written, where, "before it is written")
            memory.reads[stream] = tick
            memory.uses[stream] = tick, where
        for tensor in writes:
            memory = self._of(tensor, stream)
            self._ask(memory, stream, memory.written, where, "during another write")
            for other, count in memory.reads.items():
                self._ask(memory, stream, (other, count), where, "while it is read")
            memory.written, memory.reads = (stream, tick), {}
            memory.uses[stream] = tick, where

    def _ask(
        self, memory: _Memory, stream: int, other: tuple[int, int] | None, where: str, moment: str
    ) -> None:
        if other is None or other[0] == stream:
            return
        if self._clocks[stream].get(other[0], 0) < other[1]:
            self.faults.append(
                f"{_named(stream)} uses memory of {memory.place} {moment} on {_named(other[0])}: "
                f"{where}"
            )

    def _of(self, tensor: Any, stream: int) -> _Memory:
        storage = tensor.untyped_storage()
        known = self._memory.get(storage._cdata)
        if known is None:
            self._give_anew(stream)
            key = storage._cdata
            reference = weakref.ref(storage, partial(self._freed, key))
            # Pinned memory is not given anew before the copies that torch has begun with it end.
            home = HOST if tensor.device.type == "cpu" else stream
            known = self._memory[key] = (_Memory(home, place()), reference)
        return known[0]

    def _freed(self, key: int, _: Any = None) -> None:
        memory, _ = self._memory.pop(key)
        late = [
            (stream, count, f"memory of {memory.place}, last used by {where} on {_named(stream)}")
            for stream, (count, where) in memory.uses.items()
            if stream not in (memory.home, HOST, *memory.keepers)
        ]
        if memory.home != HOST:
            self._free.setdefault(memory.home, []).extend(late)

    def _give_anew(self, stream: int) -> None:
        """Reuse the freed memory of a stream for a new tensor, and report uses that may not have
        ended."""
        clock = self._clocks[stream]
        for other, count, fault in self._free.pop(stream, []):
            if clock.get(other, 0) < count:
                self.faults.append(f"{fault}, is used again by {_named(stream)} at {place()}")


def _named(stream: int) -> str:
    return "the host" if stream == HOST else f"stream {stream}"


def place() -> str:
    """Return the innermost function of FSDP2 or of this package on the call stack, as
    "file:function".

    Functions of the dry run are skipped; "torch" if there is none.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        is_ours = "/meshwright/" in name and not name.endswith(_ASIDE) and "/simulate/" not in name
        if is_ours or "/fsdp/" in name:
            return f"{name.rpartition('/')[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"
