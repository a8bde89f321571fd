"""The rendezvous of a rank, read from the environment. Doesn't import torch.

torchrun and Meshwright's supervisor set these variables for their ranks. Slurm's `srun` sets its
own equivalents, so that `srun meshwright train run.toml` needs no wrapper.
"""

from __future__ import annotations

import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final, NamedTuple

from meshwright.comm.interfaces import address_towards, boot_id, is_loopback
from meshwright.comm.secret import NONE, Secret
from meshwright.errors import ConfigError, refusal

# Ports of Slurm's jobs, one for each of many jobs in a row: above the usual services, below the
# ports that systems hand out themselves.
_FIRST_PORT: Final = 15000
_PORTS: Final = 15000


@dataclass(frozen=True)
class Rendezvous:
    """Where a rank meets the others.

    `listen_fd` is a socket that already listens on loopback, for the rank that hosts the store:
    `TCPStore` with an address would listen on every interface. Without it, `MASTER_ADDR` names the
    store, as under torchrun. `attempt` counts the restarts of the ranks, `job` is torchrun's or
    Slurm's job id. `agent` identifies the torchrun process of this node: the folder of its logs. A
    rank proves that it knows `secret` before it may join; `is_given`: a launcher hosts the store,
    and rank 0 joins it like all others.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    listen_fd: int | None = None
    is_local: bool = False
    attempt: int = 0
    job: str | None = None
    agent: str | None = None
    secret: Secret = NONE
    is_given: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Rendezvous | None:
        """Return the rendezvous that torchrun, `srun`, a wrapper or the supervisor has set; None if
        none has."""
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if any(name not in environ for name in needed):
            return _of_slurm(environ)
        fd = environ.get("MESHWRIGHT_LISTEN_FD")
        return cls(
            rank=int(environ["RANK"]),
            size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            local_size=int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])),
            host=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            listen_fd=int(fd) if fd else None,
            is_local="MESHWRIGHT_LOCAL" in environ,
            attempt=int(
                environ.get("MESHWRIGHT_ATTEMPT") or environ.get("TORCHELASTIC_RESTART_COUNT") or 0
            ),
            job=environ.get("TORCHELASTIC_RUN_ID"),
            agent=_agent(environ.get("TORCHELASTIC_ERROR_FILE", "")),
            secret=Secret.from_environment(environ),
            is_given=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def _agent(error_file: str) -> str | None:
    """Return the log folder of a torchrun, which has `attempt_N/LOCAL_RANK/error.json` in it."""
    parents = PurePath(error_file).parents
    return str(parents[2]) if len(parents) > 2 else None


def _of_slurm(environ: Mapping[str, str]) -> Rendezvous | None:
    """Return the rendezvous of a rank that is one of several tasks of `srun`; None elsewhere.

    The batch script itself has no step, and a step of one task starts its ranks itself. Rank 0 is
    on the first node of the list. `MASTER_ADDR` and `MASTER_PORT` take precedence if they are set.
    """
    size = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if size == 1 or "SLURM_PROCID" not in environ:
        return None
    job, tasks = environ["SLURM_JOB_ID"], list(_tasks_of(environ["SLURM_STEP_TASKS_PER_NODE"]))
    secret = Secret.from_environment(environ)
    # Anyone can read a job's number, so the port follows from the secret where there is one.
    drawn = int(secret.tag("port", job), 16) if secret else int(job)
    port = _FIRST_PORT + drawn % _PORTS
    host = environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"])
    if len(tasks) > 1 and is_loopback(host):
        rule = f"MASTER_ADDR = {host} is every node itself, and the step has {len(tasks)} nodes"
        raise ConfigError(
            refusal(
                rule,
                legal=[first_host(environ["SLURM_STEP_NODELIST"])],
                hint="Left out, it is the first node of the step.",
            )
        )
    return Rendezvous(
        rank=int(environ["SLURM_PROCID"]),
        size=size,
        local_rank=int(environ["SLURM_LOCALID"]),
        local_size=tasks[int(environ["SLURM_NODEID"])],
        host=host,
        port=int(environ.get("MASTER_PORT") or port),
        attempt=int(environ.get("SLURM_RESTART_COUNT", "0")),
        job=f"slurm-{job}",
        secret=secret,
    )


def _tasks_of(text: str) -> Iterator[int]:
    """Yield the number of tasks of each node from Slurm's notation, such as "2(x3),1"."""
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(tasks)] * int(times or 1)


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm host list: `gpu[007-009,12],login`."""
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    assert first is not None, nodes
    suffix = re.match(r"[^\]]*\]([^,\[]*)", nodes[first.end() :]) if first[2] else None
    return first[1] + (first[2] or "") + (suffix[1] if suffix else "")


def loopback_interface() -> str:
    """Return the name of the loopback interface: gloo binds to an interface, not an address."""
    return "lo0" if os.uname().sysname in ("Darwin", "FreeBSD") else "lo"


class Seat(NamedTuple):
    """Where a rank was started: its node's name and boot id, and its index among the ranks there.

    `address` is the node's on the route to the rendezvous.
    """

    node: str
    boot: str
    local_rank: int
    local_size: int
    address: str = ""


def own_seat(rendezvous: Rendezvous, environ: Mapping[str, str]) -> Seat:
    """Return the seat of this process.

    The scheduler's or the system's name identifies a node, together with Linux's random boot id,
    because several nodes may have the same name, such as "localhost".
    """
    name = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Seat(
        name,
        boot_id(),
        rendezvous.local_rank,
        rendezvous.local_size,
        address_towards(rendezvous.host, rendezvous.port),
    )


def seated(seats: Sequence[Seat]) -> list[int]:
    """Return each rank's new number, indexed by the number with which it was started.

    Meshes and plans assume that the ranks of a node are consecutive, so that inner axes use a
    node's own links. Launchers may distribute ranks cyclically (Slurm's `--distribution=cyclic`),
    so they are renumbered node by node, nodes in the order of their first rank; rank 0 stays rank
    0. Raises `ConfigError` if nodes have different numbers of ranks, or other than their launcher
    says, or if machines would meet on loopback.
    """
    _check_reachable(seats)
    launched: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for rank, seat in enumerate(seats):
        launched[seat.node, seat.boot, seat.local_rank].append(rank)
    nodes: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for (node, boot, _), ranks in launched.items():
        for turn, rank in enumerate(ranks):  # several launchers may share a machine
            nodes[node, boot, turn].append(rank)
    _check_nodes(seats, [sorted(ranks) for ranks in nodes.values()])
    in_order = [rank for ranks in sorted(nodes.values(), key=min) for rank in sorted(ranks)]
    numbers = {rank: number for number, rank in enumerate(in_order)}
    return [numbers[rank] for rank in range(len(seats))]


def _check_reachable(seats: Sequence[Seat]) -> None:
    """Raise `ConfigError` for several machines that have only loopback addresses."""
    several = len({seat.boot for seat in seats}) > 1
    if several and all(is_loopback(seat.address) for seat in seats):
        known = "; ".join(sorted({f"{seat.node} {seat.address}" for seat in seats}))
        hint = "Name an address that all nodes see."
        rule = f"MASTER_ADDR leads several machines to loopback ({known})"
        raise ConfigError(refusal(rule, hint=hint))


def _check_nodes(seats: Sequence[Seat], nodes: Sequence[Sequence[int]]) -> None:
    """Raise `ConfigError` for nodes with different numbers of ranks, or with others than stated."""
    listed = "; ".join(f"{seats[ranks[0]].node} has ranks {list(ranks)}" for ranks in nodes)
    sizes = {len(ranks) for ranks in nodes}
    if len(sizes) > 1:
        raise ConfigError(
            refusal(
                f"every node must have as many ranks as the others, but {listed}",
                legal=[f"{size} on each" for size in sorted(sizes)],
            )
        )
    (size,) = sizes
    stated = {seat.local_size for seat in seats}
    if stated != {size}:
        raise ConfigError(
            refusal(
                f"LOCAL_WORLD_SIZE = {', '.join(map(str, sorted(stated)))} must be the ranks of a "
                f"node, but {listed}",
                legal=[size],
                hint="Without it all ranks are taken to be on one node.",
            )
        )
