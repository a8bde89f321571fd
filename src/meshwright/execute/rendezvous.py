"""Where a rank meets the others, read from the environment. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rendezvous:
    """Where a rank meets the others.

    `listen_fd` is a socket that already listens on loopback, for the rank that hosts the store:
    `TCPStore` given an address would listen on every interface. Without it the store is the one
    that `MASTER_ADDR` names, as under torchrun. `attempt` counts the restarts of the ranks, `job`
    is torchrun's id of them all.
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

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Rendezvous | None:
        """Return what torchrun, Slurm wrappers or our supervisor put in the environment, if so."""
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if any(name not in environ for name in needed):
            return None
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
        )


def loopback_interface() -> str:
    """Return the name of the loopback interface: gloo binds to an interface, not an address."""
    return "lo0" if os.uname().sysname in ("Darwin", "FreeBSD") else "lo"
