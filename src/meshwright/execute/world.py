"""Joining the other ranks: process groups, the device of this rank, and small collectives."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from meshwright.errors import MeshwrightError
from meshwright.execute.ledger import Ledger
from meshwright.execute.rendezvous import Rendezvous, loopback_interface


@dataclass(frozen=True)
class World:
    """All ranks as one of them sees them.

    `store` holds small texts that all ranks can read. `opened` are the groups that
    `execute.groups` has opened so far, by how they divide the ranks. `ledger` is where this rank
    enters what it does.
    """

    rank: int
    size: int
    device: torch.device
    store: Store
    opened: dict[object, dist.ProcessGroup | None] = field(default_factory=dict, compare=False)
    ledger: Ledger = field(default_factory=Ledger, compare=False)

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
        if self.rank == 0:
            try:
                text = make()
            except BaseException as error:
                self.store.set(key, f"!{error}")
                raise
            self.store.set(key, f"={text}")
            return text
        said = str(self.store.get(key).decode())
        if said.startswith("!"):
            raise MeshwrightError(f"rank 0 refused: {said[1:]}")
        return said[1:]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum_on_host([0.0])


def join(
    at: Rendezvous, device: str, timeout_s: float = 600.0, ledger: Ledger | None = None
) -> World:
    """Join the process group and return the world; gloo serves the host, NCCL the GPUs.

    Raises `torch.distributed.DistError` when the ranks do not meet within `timeout_s`.
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
    dist.init_process_group(backend, store=store, rank=at.rank, world_size=at.size, timeout=timeout)
    return World(at.rank, at.size, own, store, ledger=ledger or Ledger())


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
