"""Generations of an elastic run: which replicas train together, as the supervisor announces it.

The supervisor and the ranks of one machine share a private folder. Doesn't import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from meshwright.files import write_atomic
from meshwright.layout import Layout
from meshwright.parsing import parse_json

# The environment variable that names the folder to a rank.
ELASTIC: Final = "MESHWRIGHT_ELASTIC"


class ReplicaGeneration(NamedTuple):
    """Replicas that train together until one is lost or joins; numbers count from 1.

    `replicas` are the indices along `dp_replicate` of the run's layout, in the order of their seats
    in this generation: those that stay come first, so that their first rank keeps the log.
    """

    number: int
    replicas: tuple[int, ...]

    def layout(self, layout: Layout) -> Layout:
        """Return the layout of this generation: that of the run, with fewer replicas."""
        return layout.model_copy(update={"dp_replicate": len(self.replicas)})

    def ranks(self, layout: Layout) -> list[int]:
        """Return the number with which each of this generation's ranks was started, by rank."""
        mesh, seats = layout.mesh, self.layout(layout).mesh
        started = []
        for rank in range(seats.size):
            coordinates = dict(seats.coordinates(rank))
            coordinates["dp_replicate"] = self.replicas[coordinates["dp_replicate"]]
            started.append(mesh.rank(coordinates))
        return started


def replica_of(layout: Layout, rank: int) -> int:
    """Return the replica that a rank belongs to, its index along `dp_replicate`."""
    return layout.mesh.coordinates(rank)["dp_replicate"]


def ranks_of(layout: Layout, replica: int) -> list[int]:
    """Return the ranks of a replica."""
    return [rank for rank in range(layout.world) if replica_of(layout, rank) == replica]


def replicas_text(replicas: Iterable[int]) -> str:
    """Return `replica 1` or `replicas 0, 2`, in order."""
    listed = sorted(replicas)
    return f"replica{'' if len(listed) == 1 else 's'} {', '.join(map(str, listed))}"


class Announcements:
    """The folder in which generations are announced, and ranks say that they have loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "generation.json"

    def announce(self, generation: ReplicaGeneration) -> None:
        """Make a generation the newest."""
        write_atomic(self._file, json.dumps(generation).encode())

    def newest(self) -> ReplicaGeneration | None:
        """Return the newest generation; None before the first."""
        try:
            number, replicas = parse_json(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return ReplicaGeneration(int(number), tuple(map(int, replicas)))

    def ready(self, rank: int, process: int, digest: str) -> None:
        """Say that a rank in a process can join a generation; `digest` is that of its inputs."""
        write_atomic(self.folder / f"ready-{rank}-{process}", digest.encode())

    def digest(self, rank: int, process: int) -> str | None:
        """Return the digest of a rank's inputs, None if it has not said that it can join."""
        try:
            return (self.folder / f"ready-{rank}-{process}").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def meeting(self, generation: ReplicaGeneration) -> Path:
        """Return the folder in which the ranks of a generation meet, after creating it."""
        folder = self.folder / f"generation-{generation.number}"
        folder.mkdir(exist_ok=True)
        return folder

    def here(self, generation: ReplicaGeneration, rank: int) -> None:
        """Say that a rank is ready to meet the others of a generation."""
        (self.meeting(generation) / f"rank-{rank}").touch()

    def are_here(self, generation: ReplicaGeneration, ranks: Sequence[int]) -> bool:
        """Whether all of some ranks are ready to meet."""
        meeting = self.meeting(generation)
        return all((meeting / f"rank-{rank}").exists() for rank in ranks)
