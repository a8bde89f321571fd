"""Whether what one stream uses is waited for and kept alive, as `torch.cuda._sanitizer` asks.

Each stream has a vector clock (doi.org/10.1145/359545.359563): how far it knows each of them to
be. A use of a tensor has to know of the write before, a write also of the reads; and memory that
is freed goes to the next tensor of the stream that it was allocated on, which has to know of all
its uses. The host is a stream as well, which knows of a device what it has waited for.
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
    """A storage: where it was allocated, who has written it, who has read it since, who keeps it.

    `uses` are the last uses by stream, with their places in the code.
    """

    home: int
    place: str
    written: tuple[int, int] | None = None
    reads: Time = field(default_factory=dict)
    uses: dict[int, tuple[int, str]] = field(default_factory=dict)
    keepers: set[int] = field(default_factory=set)


class StreamOrder:
    """The work of streams, in the order in which the host enqueues it.

    `faults` are sentences; `waits` are what the host has waited for, with the place in the code.
    """

    def __init__(self) -> None:
        self._clocks: dict[int, Time] = {HOST: {}}
        self._memory: dict[int, tuple[_Memory, weakref.ref[Any]]] = {}
        # By the stream that memory goes back to: who used it last, until when.
        self._free: dict[int, list[tuple[int, int, str]]] = {}
        self.faults: list[str] = []
        self.waits: list[str] = []

    def new_stream(self) -> int:
        """Return the number of a new stream."""
        number = len(self._clocks) - 1
        self._clocks[number] = {number: 0}
        return number

    def now(self, stream: int) -> Time:
        """Return how far a stream is, and knows others to be."""
        return dict(self._clocks[stream])

    def everything(self) -> Time:
        """Return how far all streams are."""
        return {number: clock.get(number, 0) for number, clock in self._clocks.items()}

    def wait(self, stream: int, until: Time) -> None:
        """Have later work on a stream wait for a time."""
        clock = self._clocks[stream]
        for number, count in until.items():
            clock[number] = max(clock.get(number, 0), count)

    def host_waits(self, cause: str, until: Time) -> None:
        """Have the host wait for a time, which holds it up."""
        self.waits.append(f"{cause} at {place()}")
        self.wait(HOST, until)

    def keep(self, tensor: Any, stream: int) -> None:
        """Keep a tensor's memory from reuse while a stream may use it."""
        self._of(tensor, HOST).keepers.add(stream)

    def use(self, stream: int, reads: Iterable[Any], writes: Iterable[Any], name: str) -> None:
        """Enter an operation on a stream: the tensors that it reads and writes."""
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
        """Give freed memory to a new tensor of the stream that it was allocated on."""
        clock = self._clocks[stream]
        for other, count, fault in self._free.pop(stream, []):
            if clock.get(other, 0) < count:
                self.faults.append(f"{fault}, is used again by {_named(stream)} at {place()}")


def _named(stream: int) -> str:
    return "the host" if stream == HOST else f"stream {stream}"


def place() -> str:
    """Return the innermost function of FSDP2 or of the package, outside of the dry run's code."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        is_ours = "/meshwright/" in name and not name.endswith(_ASIDE) and "/simulate/" not in name
        if is_ours or "/fsdp/" in name:
            return f"{name.rpartition('/')[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"
