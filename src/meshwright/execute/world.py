"""Joining the other ranks: process groups, the device of this rank, and small collectives."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from meshwright.errors import MeshwrightError
from meshwright.execute.ledger import Ledger
from meshwright.execute.rendezvous import Rendezvous, Seat, loopback_interface, own_seat, seated

_READ_S: Final = 5.0  # for other ranks to read why rank 0 ends


@dataclass(frozen=True)
class World:
    """All ranks as one of them sees them, numbered node by node (`rendezvous.seated`).

    `store` holds small texts that all ranks can read. `opened` are the groups that
    `execute.groups` has opened so far, by how they divide the ranks. `ledger` is where this rank
    enters what it does. `nodes` are the names of the nodes, which have equally
    many ranks in a row; ranks that a supervisor has started have none.
    """

    rank: int
    size: int
    device: torch.device
    store: Store
    opened: dict[object, dist.ProcessGroup | None] = field(default_factory=dict, compare=False)
    ledger: Ledger = field(default_factory=Ledger, compare=False)
    nodes: tuple[str, ...] = ()

    def sum_on_host(self, values: list[float]) -> list[float]:
        """Return the sums over all ranks of some numbers, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(total)
        return cast(list[float], total.tolist())

    def gather_on_host(self, values: list[float]) -> list[list[float]]:
        """Return the numbers of every rank, by rank, in float64."""
        mine = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(found, mine)
        else:
            found = [mine]
        return [cast(list[float], row.tolist()) for row in found]

    def from_rank_0(self, key: str, make: Callable[[], str]) -> str:
        """Return the text that rank 0 makes; where making it fails there, every rank raises.

        Raises `MeshwrightError` with rank 0's message on the other ranks.
        """
        return _from_rank_0(self.store, self, key, make)

    def node(self, rank: int) -> str:
        """Return the name of a rank's node; empty where all are on this one."""
        return self.nodes[rank * len(self.nodes) // self.size] if self.nodes else ""

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum_on_host([0.0])


def join(
    at: Rendezvous, device: str, timeout_s: float = 600.0, ledger: Ledger | None = None
) -> World:
    """Join the process group and return the world; gloo serves the host, NCCL the GPUs.

    Ranks that others have started are numbered node by node, so `World.rank` may not be the one
    they were started with. Raises `torch.distributed.DistError` when the ranks do not meet within
    `timeout_s`, and `ConfigError` or `MeshwrightError` where nodes differ in their ranks.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    own = torch.device("cpu")
    backend = "gloo"
    if device == "cuda":
        own = torch.device("cuda", at.local_rank)
        torch.cuda.set_device(own)
        backend = "cpu:gloo,cuda:nccl"
    if at.is_local:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    store = _meet(at, timeout)
    rank, nodes = (at.rank, ()) if at.is_local else _seated(at, store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=at.size, timeout=timeout)
    return World(rank, at.size, own, store, ledger=ledger or Ledger(), nodes=nodes)


def _meet(at: Rendezvous, timeout: datetime.timedelta) -> Store:
    """Return the store that the ranks of this attempt meet in."""
    if at.is_local:
        listen = at.listen_fd if at.rank == 0 else None
        return dist.TCPStore(  # type: ignore[attr-defined]
            at.host,
            at.port,
            at.size,
            is_master=at.rank == 0,
            timeout=timeout,
            master_listen_fd=listen,
        )
    found = _met_by_environment(at, timeout)
    # torchrun keeps one store for all attempts: without a prefix of its own each would read where
    # dead ranks of the one before have listened.
    return dist.PrefixStore(f"meshwright/{at.attempt}", found)  # type: ignore[attr-defined]


def _met_by_environment(at: Rendezvous, timeout: datetime.timedelta) -> Store:
    """Return the store of torchrun or of a wrapper, or rank 0's own where nothing has made one."""
    if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
        found, _, _ = next(dist.rendezvous("env://", at.rank, at.size, timeout=timeout))  # type: ignore[attr-defined]
        return cast(Store, found)
    return dist.TCPStore(at.host, at.port, at.size, is_master=at.rank == 0, timeout=timeout)  # type: ignore[attr-defined]


def _seated(at: Rendezvous, store: Store) -> tuple[int, tuple[str, ...]]:
    """Return the number that this rank gets, and the names of the nodes."""
    store.set(f"seat/{at.rank}", json.dumps(own_seat(at, os.environ)))

    def gather() -> str:
        return json.dumps([json.loads(store.get(f"seat/{rank}")) for rank in range(at.size)])

    seats = [Seat(*seat) for seat in json.loads(_from_rank_0(store, at, "seats", gather))]
    numbers = seated(seats)
    names = [seat.node for _, seat in sorted(zip(numbers, seats, strict=True))]
    return numbers[at.rank], tuple(names[:: at.local_size])


def _from_rank_0(store: Store, at: World | Rendezvous, key: str, make: Callable[[], str]) -> str:
    """Return the text that rank 0 makes, on every rank, or raise what it says instead."""
    if at.rank == 0:
        try:
            text = make()
        except BaseException as error:
            store.set(key, f"!{error}")
            _wait_for_readers(store, key, at.size)
            raise
        store.set(key, f"={text}")
        return text
    said = str(store.get(key).decode())
    store.add(f"{key}/read", 1)
    if said.startswith("!"):
        raise MeshwrightError(f"rank 0 refused: {said[1:]}")
    return said[1:]


def _wait_for_readers(store: Store, key: str, size: int) -> None:
    """Give the others a moment to read: this process may be the one that the store is in."""
    until = time.monotonic() + _READ_S
    while store.add(f"{key}/read", 0) < size - 1 and time.monotonic() < until:
        time.sleep(0.02)


def leave() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def exchange(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Return every rank's text, by rank, over a gloo group; without a group this one's alone."""
    if group is None:
        return [text]
    mine = torch.tensor(bytearray(text.encode()), dtype=torch.uint8)
    size = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    longest = max(int(n) for n in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    found = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(found, padded, group=group)
    return [bytes(row[: int(n)].numpy()).decode() for row, n in zip(found, sizes, strict=True)]
