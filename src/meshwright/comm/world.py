"""Joins the other ranks: process groups, the device of this rank, and small collectives."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.interfaces import (
    address_towards,
    asked_for,
    interface_of,
    interfaces,
    is_loopback,
    listen_at,
    own_address,
)
from meshwright.comm.rendezvous import (
    Rendezvous,
    Seat,
    loopback_interface,
    own_seat,
    seated,
)
from meshwright.comm.secret import VARIABLE
from meshwright.comm.values import gather_bytes
from meshwright.errors import ConfigError, MeshwrightError

_READ_S: Final = 5.0  # for other ranks to read why rank 0 ends


@dataclass(frozen=True)
class World:
    """All ranks, as seen by one of them; they are numbered node by node (`rendezvous.seated`).

    `store` holds small texts that all ranks can read. `opened` has the groups that `comm.groups`
    has opened so far, by how they divide the ranks. `recorder` is this rank's flight recorder.
    `nodes` are the names of the nodes, each with equally many consecutive ranks; empty for ranks
    that a supervisor has started.
    """

    rank: int
    size: int
    device: torch.device
    store: Store
    opened: dict[object, dist.ProcessGroup | None] = field(default_factory=dict, compare=False)
    recorder: FlightRecorder = field(default_factory=FlightRecorder, compare=False)
    nodes: tuple[str, ...] = ()

    def sum_on_host(self, values: list[float]) -> list[float]:
        """Return the sums of the numbers over all ranks, in float64; a collective."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(total)
        return cast(list[float], total.tolist())

    def gather_on_host(self, values: list[float]) -> list[list[float]]:
        """Return the numbers of every rank, indexed by rank, in float64; a collective."""
        local = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(gathered, local)
        else:
            gathered = [local]
        return [cast(list[float], row.tolist()) for row in gathered]

    def from_rank_0(self, key: str, make: Callable[[], str]) -> str:
        """Return, on every rank, the text that `make` returns on rank 0.

        If that fails, every rank raises: the others `MeshwrightError` with rank 0's message. `key`
        must be unused.
        """
        return _from_rank_0(self.store, self, key, make)

    def node(self, rank: int) -> str:
        """Return the name of a rank's node; empty where all are on this one."""
        return self.nodes[rank * len(self.nodes) // self.size] if self.nodes else ""

    def anyone(self, vote: bool) -> bool:
        """Return whether any rank votes True; a collective."""
        return self.sum_on_host([float(vote)])[0] > 0

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.sum_on_host([0.0])


def join(
    rendezvous: Rendezvous,
    device: str,
    timeout_s: float = 600.0,
    recorder: FlightRecorder | None = None,
) -> World:
    """Join the process group and return the world; gloo serves the host, NCCL the GPUs.

    Ranks of other launchers are renumbered node by node, so `World.rank` may differ from the number
    they were started with. Raises `torch.distributed.DistError` if the ranks do not meet within
    `timeout_s`, and `ConfigError` or `MeshwrightError` if nodes have different numbers of ranks.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    rank_device = torch.device("cpu")
    backend = "gloo"
    if device == "cuda":
        rank_device = torch.device("cuda", rendezvous.local_rank)
        torch.cuda.set_device(rank_device)
        backend = "cpu:gloo,cuda:nccl"
    meeting = meet(rendezvous, timeout_s)
    if meeting.interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
        if len(meeting.nodes) > 1:  # NCCL takes a bare name for all that begin with it
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={meeting.interface}")
    rank, store = meeting.rank, meeting.store
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=rendezvous.size, timeout=timeout
    )
    return World(
        rank,
        rendezvous.size,
        rank_device,
        store,
        recorder=recorder or FlightRecorder(),
        nodes=meeting.nodes,
    )


@dataclass(frozen=True)
class Meeting:
    """Ranks that have met in a store, but have no process group yet.

    `rank` is this rank's new number, `interface` its network interface, `address` its own address
    there; `is_chosen` if the environment did not select that interface.
    """

    rank: int
    store: Store
    nodes: tuple[str, ...] = ()
    interface: str | None = None
    address: str = ""
    is_chosen: bool = True


def meet(rendezvous: Rendezvous, timeout_s: float) -> Meeting:
    """Meet the other ranks in a store, and determine this rank's number and network interface.

    If the job has a secret, only ranks that know it may join, and their keys in the store are
    derived from it, so nobody can guess them. Raises like `join`, and `MeshwrightError` if ranks do
    not prove that they know the secret.
    """
    chosen = asked_for(os.environ)
    store = _store(rendezvous, datetime.timedelta(seconds=timeout_s))
    seat = Seat("", "", 0, 0) if rendezvous.is_local else own_seat(rendezvous, os.environ)
    texts: list[str] = []
    if rendezvous.secret:
        texts, store = roll_call(store, rendezvous, json.dumps(seat))
    elif not rendezvous.is_local:
        texts = shared(store, rendezvous, "seat", json.dumps(seat))
    if rendezvous.is_local:
        return Meeting(
            rendezvous.rank,
            store,
            (),
            chosen or loopback_interface(),
            rendezvous.host,
            chosen is None,
        )
    seats = [Seat(*json.loads(text)) for text in texts]
    try:
        numbers = seated(seats)
    except ConfigError:
        part(store, rendezvous)
        raise
    names = [seat.node for _, seat in sorted(zip(numbers, seats, strict=True))]
    nodes = tuple(names[:: rendezvous.local_size])
    addresses = [seat.address for seat in seats]
    if chosen is None:
        address = own_address(seat.address, addresses, rendezvous.port)
        return Meeting(numbers[rendezvous.rank], store, nodes, interface_of(address), address)
    address = interfaces().get(chosen) or own_address(seat.address, addresses, rendezvous.port)
    return Meeting(numbers[rendezvous.rank], store, nodes, chosen, address, is_chosen=False)


def roll_call(store: Store, rendezvous: Rendezvous, text: str) -> tuple[list[str], Store]:
    """Return every rank's text after all have proved to know the secret, and the new store.

    Rank 0 publishes a random number, each rank answers with its text and a number of its own, and
    rank 0 sends back all answers. Each message is signed, so nobody can forge or replay an answer
    or rank 0's messages. Raises `MeshwrightError` naming the ranks that do not prove it.
    """
    secret, nonce = rendezvous.secret, secrets.token_hex(16)
    hidden = dist.PrefixStore(secret.tag("keys", str(rendezvous.attempt)), store)  # type: ignore[attr-defined]
    if rendezvous.rank == 0:
        hidden.set("asked", nonce)
    challenge = _awaited(hidden, "asked", [0])
    answer = json.dumps([text, nonce])
    hidden.set(f"answer/{rendezvous.rank}", secret.sign(answer, challenge, str(rendezvous.rank)))
    if rendezvous.rank == 0:
        answers = []
        for rank in range(rendezvous.size):
            signed = _awaited(hidden, f"answer/{rank}", range(rank, rendezvous.size))
            answers.append(_proved(secret.opened(signed, challenge, str(rank)), rank))
        hidden.set("all", secret.sign(json.dumps(answers), challenge, "all"))
    else:
        signed = _awaited(hidden, "all", [0])
        answers = json.loads(_proved(secret.opened(signed, challenge, "all"), 0))
        _proved(answer if answers[rendezvous.rank] == answer else None, 0)
    session = dist.PrefixStore(secret.tag("session", *answers), store)  # type: ignore[attr-defined]
    return [str(json.loads(answer)[0]) for answer in answers], session


def _proved(answer: str | None, rank: int) -> str:
    if answer is None:
        raise MeshwrightError(
            f"rank {rank} does not prove that it knows this job's secret ({VARIABLE}): someone "
            "else has written to the store, or the ranks have different secrets"
        )
    return answer


def _awaited(store: Store, key: str, ranks: Sequence[int]) -> str:
    """Return the value of a key in the store; on a time-out, the error names the `ranks` that did
    not come."""
    try:
        return str(store.get(key).decode("utf-8", "replace"))
    except dist.DistError as error:
        missing = [rank for rank in ranks if len(ranks) == 1 or not store.check([f"answer/{rank}"])]
        raise MeshwrightError(
            f"rank {', '.join(map(str, missing))} did not come within the time-out, or does not "
            f"know this job's secret ({VARIABLE}). {error}"
        ) from error


def shared(store: Store, world: World | Rendezvous, key: str, text: str) -> list[str]:
    """Return every rank's text, by rank, on all ranks; rank 0 collects them in the store under
    `key`."""
    store.set(f"{key}/{world.rank}", text)

    def gather() -> str:
        return json.dumps([store.get(f"{key}/{rank}").decode() for rank in range(world.size)])

    return [str(text) for text in json.loads(_from_rank_0(store, world, f"{key}/all", gather))]


def _store(rendezvous: Rendezvous, timeout: datetime.timedelta) -> Store:
    """Return the store in which the ranks of this attempt meet."""
    if rendezvous.is_local:
        listen = rendezvous.listen_fd if rendezvous.rank == 0 else None
        return _tcp_store(rendezvous, rendezvous.host, timeout, listen)
    # torchrun keeps one store for all attempts: without a prefix of its own each would read where
    # dead ranks of the one before have listened.
    return dist.PrefixStore(  # type: ignore[attr-defined]
        f"meshwright/{rendezvous.attempt}", _met_on_network(rendezvous, timeout)
    )


def _met_on_network(rendezvous: Rendezvous, timeout: datetime.timedelta) -> Store:
    """Return the store of torchrun, or the one that rank 0 hosts if no launcher does.

    Raises `MeshwrightError` if rank 0 cannot be found, or cannot listen.
    """
    try:
        if rendezvous.is_given:
            store, _, _ = next(
                dist.rendezvous(  # type: ignore[attr-defined]
                    "env://", rendezvous.rank, rendezvous.size, timeout=timeout
                )
            )
            return cast(Store, store)
        if rendezvous.rank > 0:
            return _tcp_store(rendezvous, rendezvous.host, timeout)
        listener, host = listen_at(
            rendezvous.host, rendezvous.port, is_alone=rendezvous.local_size == rendezvous.size
        )
        return _tcp_store(rendezvous, host, timeout, listener.detach())
    except dist.DistNetworkError as error:
        itself = is_loopback(address_towards(rendezvous.host, rendezvous.port))
        hint = ", which is this machine: name an address that all nodes see" if itself else ""
        where = f"MASTER_ADDR = {rendezvous.host}, port {rendezvous.port}{hint}"
        raise MeshwrightError(
            f"rank {rendezvous.rank} does not find rank 0 at {where}. {error}"
        ) from error
    except OSError as error:
        where = f"MASTER_ADDR = {rendezvous.host}, port {rendezvous.port}"
        raise MeshwrightError(f"rank 0 cannot listen at {where}: {error.strerror}") from error


def _tcp_store(
    rendezvous: Rendezvous, host: str, timeout: datetime.timedelta, listen_fd: int | None = None
) -> Store:
    """Return the `TCPStore` that rank 0 hosts.

    `listen_fd` is a socket of rank 0 that already listens; without it, `TCPStore` would listen on
    every interface.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        rendezvous.port,
        rendezvous.size,
        is_master=rendezvous.rank == 0,
        timeout=timeout,
        master_listen_fd=listen_fd,
    )


def _from_rank_0(store: Store, world: World | Rendezvous, key: str, make: Callable[[], str]) -> str:
    """Return, on every rank, the text that `make` returns on rank 0; raises on every rank if that
    fails."""
    if world.rank == 0:
        try:
            text = make()
        except BaseException as error:
            store.set(key, f"!{error}")
            _wait_for_readers(store, key, world.size)
            raise
        store.set(key, f"={text}")
        return text
    reply = str(store.get(key).decode())
    store.add(f"{key}/read", 1)
    if reply.startswith("!"):
        raise MeshwrightError(f"rank 0 refused: {reply[1:]}")
    return reply[1:]


def part(store: Store, world: World | Rendezvous) -> None:
    """Disconnect from the store; the rank that may host it waits a moment for the others."""
    if world.rank == 0:
        _wait_for_readers(store, "end", world.size)
    else:
        store.add("end/read", 1)


def _wait_for_readers(store: Store, key: str, size: int) -> None:
    """Wait a limited time until the other ranks have read a key, because this process may host the
    store."""
    until = time.monotonic() + _READ_S
    while store.add(f"{key}/read", 0) < size - 1 and time.monotonic() < until:
        time.sleep(0.02)


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def exchange(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Return every rank's text over a gloo group, by rank; without a group, only its own."""
    if group is None:
        return [text]
    gathered = gather_bytes(text.encode(), group, torch.device("cpu"))
    return [answer.decode() for answer in gathered]
