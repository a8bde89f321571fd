"""Leaves broken process groups, and joins the next generation of an elastic run, on gloo."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import socket
import stat
import time
from typing import Any, Final

import torch
import torch.distributed as dist

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.generations import Announcements, ReplicaGeneration
from meshwright.comm.rendezvous import loopback_interface
from meshwright.comm.shared import channels, release_channels
from meshwright.comm.world import World
from meshwright.layout import Layout
from meshwright.torch_private import abort_process_group, c10d_state

# A rank that dies while others connect to it, or read from it what they lack, costs them at most
# this time each; later, the closed connection tells them at once.
CONNECT_S: Final = 60.0
_POLL_S: Final = 0.01


def await_generation(
    announced: Announcements, after: int, replica: int, wait_s: float
) -> ReplicaGeneration | None:
    """Wait for a generation with a replica and a number above `after`; None if `wait_s` seconds
    bring none.
    """
    until = time.monotonic() + wait_s
    while True:
        newest = announced.newest()
        if newest is not None and newest.number > after and replica in newest.replicas:
            return newest
        if time.monotonic() > until:
            return None
        time.sleep(_POLL_S)


def join_generation(
    announced: Announcements,
    generation: ReplicaGeneration,
    layout: Layout,
    started_as: int,
    recorder: FlightRecorder,
    timeout_s: float,
) -> World | None:
    """Join the process group of a generation and return its world; a collective of its ranks.

    `layout` is the run's, `started_as` this rank's number in it. None if a newer generation is
    announced before all have come. Raises `torch.distributed.DistError` or `RuntimeError` if a rank
    ends meanwhile.
    """
    ranks = generation.ranks(layout)
    announced.here(generation, started_as)
    while not announced.are_here(generation, ranks):
        newest = announced.newest()
        if newest is not None and newest.number > generation.number:
            return None
        time.sleep(_POLL_S)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    path = announced.meeting(generation) / "store"
    store = dist.FileStore(str(path), len(ranks))  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=min(timeout_s, CONNECT_S))
    rank = ranks.index(started_as)
    recorder.renumber(ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(ranks), timeout=timeout)
    return World(rank, len(ranks), torch.device("cpu"), store, recorder=recorder)


def wait_up_to(timeout_s: float) -> None:
    """Set the time-out of collectives in all groups and channels of this process."""
    timeout = datetime.timedelta(seconds=timeout_s)
    for group in c10d_state.pg_map:
        backend: Any = group._get_backend(torch.device("cpu"))
        backend._set_default_timeout(timeout)
    for channel in channels():
        channel.timeout_s = timeout_s


def leave_generation() -> None:
    """Close all groups and channels, whatever is under way in them, so that no peer waits here.

    Connections are shut down first: torch closes those of a group only once nothing refers to it
    any more, and a peer that is not a neighbour of the rank that ended learns of it from this one.
    """
    release_channels()
    shut_connections()
    if dist.is_initialized():
        abort_process_group()


def shut_connections() -> None:
    """Shut down the connections of this machine with itself that no Python object owns: gloo's."""
    owned = {thing.fileno() for thing in gc.get_objects() if issubclass(type(thing), socket.socket)}
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):  # it is closed meanwhile, or not connected
            if descriptor in owned or not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                is_network = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_network and connection.getpeername()[0] == connection.getsockname()[0]:
                    connection.shutdown(socket.SHUT_RDWR)
