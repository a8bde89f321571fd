"""`Mesh`: the named axes of a layout in their fixed order, and the coordinates of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """Degrees of the axes `pp, dp_replicate, dp_shard, cp, tp`; the last varies fastest."""

    shape: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, **degrees: int) -> Mesh:
        """Return the mesh with the given degrees; a missing axis has degree 1."""
        unknown = set(degrees) - set(AXES)
        if unknown:
            raise ValueError(f"unknown mesh axes {sorted(unknown)}; axes are {AXES}")
        pp, replicate, shard, cp, tp = (degrees.get(axis, 1) for axis in AXES)
        return cls((pp, replicate, shard, cp, tp))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.shape[AXES.index(axis)]

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Return the coordinates of a rank, by axis name; raises `ValueError` outside the mesh."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a mesh of {self.size} ranks")
        by_axis = {}
        for axis, degree in reversed(list(zip(AXES, self.shape, strict=True))):
            rank, by_axis[axis] = divmod(rank, degree)
        return {axis: by_axis[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at some coordinates; a missing axis is at 0."""
        rank = 0
        for axis, degree in zip(AXES, self.shape, strict=True):
            rank = rank * degree + coordinates.get(axis, 0)
        return rank

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along the given axes, including itself."""
        own_coordinates = self.coordinates(rank)
        choices = product(*(range(self.degree(axis)) for axis in axes))
        return tuple(
            self.rank({**own_coordinates, **dict(zip(axes, indices, strict=True))})
            for indices in choices
        )

    def data_rank(self, rank: int) -> int:
        """Return which share of the global batch a rank reads: its index along both dp axes."""
        coordinates = self.coordinates(rank)
        return coordinates["dp_replicate"] * self.degree("dp_shard") + coordinates["dp_shard"]
