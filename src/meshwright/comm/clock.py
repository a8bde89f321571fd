"""Clocks for recorded steps: the progress of a GPU's stream, and the offsets between machines."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from meshwright.comm.flight_recorder import Pending
from meshwright.comm.tape import Clock, HostClock
from meshwright.comm.world import World, exchange

EXCHANGES: Final = 8
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class DeviceClock:
    """Stamps moments by events on the compute stream: when the GPU, not the host, reaches them.

    Other streams are not stamped: their work overlaps with that of the compute stream. It must be
    created while the stream is idle, so that its first event is now.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._first = self._event()
        self._began = time.monotonic()
        self._last = self._first

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def stamp(self) -> torch.cuda.Event | None:
        """Record an event on the compute stream and return it; None if another stream is
        current."""
        if torch.cuda.current_stream(self._device) != self._stream:
            return None
        self._last = self._event()
        return self._last

    def seconds(self, stamp: Any) -> float:
        """Return when the GPU reached a stamp, in seconds of the host's clock; waits for the last
        stamp."""
        self._last.synchronize()
        elapsed_ms: float = self._first.elapsed_time(stamp)
        return self._began + elapsed_ms / 1e3


def clock_of(device: torch.device) -> Clock:
    """Return the clock that follows a device: of the GPU's stream, or the host's for a CPU."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def machine_name() -> str:
    """Return the boot id of this machine; processes with the same one share a monotonic clock."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def clock_offset(
    world: World,
    clock: Callable[[], float] = time.monotonic,
    machine: Callable[[], str] = machine_name,
) -> float:
    """Return the seconds from this rank's monotonic clock to rank 0's; a collective.

    One rank of each other machine repeatedly asks rank 0 for the time. The answer is assumed to be
    from the middle of the fastest exchange, so the error is at most half of it (Cristian,
    Distributed Computing 3, 1989).
    """
    if world.size == 1:
        return 0.0
    machines = exchange(machine(), dist.group.WORLD)
    first = [machines.index(name) for name in machines]  # the first rank of each rank's machine
    offset = 0.0
    for rank in sorted(set(first) - {0}):
        if world.rank == rank:
            _, offset = min(_ask(world, clock) for _ in range(EXCHANGES))
        elif world.rank == 0:
            for _ in range(EXCHANGES):
                _answer(world, rank, clock)
    if any(first):
        offset = world.gather_on_host([offset])[first[world.rank]][0]
    return offset


def _ask(world: World, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of an exchange with rank 0, and the offset from this rank's clock to rank
    0's."""
    reply = torch.zeros(1, dtype=torch.float64)
    sent = clock()
    Pending(world.recorder, dist.isend(reply, 0)).wait()
    Pending(world.recorder, dist.irecv(reply, 0)).wait()
    received = clock()
    return received - sent, reply.item() - (sent + received) / 2


def _answer(world: World, rank: int, clock: Callable[[], float]) -> None:
    """Send this rank's time to another rank as soon as it asks."""
    message = torch.zeros(1, dtype=torch.float64)
    Pending(world.recorder, dist.irecv(message, rank)).wait()
    message.fill_(clock())
    Pending(world.recorder, dist.isend(message, rank)).wait()
