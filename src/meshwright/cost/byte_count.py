"""`ByteCount`: the bytes that a rank has allocated, by category, with snapshots over a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PredictedMoment(NamedTuple):
    """A snapshot of a rank's allocated bytes by category, with the action of the pipeline's table
    and the operation (`what`) during which it was taken."""

    action: str
    what: str
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        """The bytes of all categories."""
        return sum(self.held.values())


class ByteCount:
    """Counts allocated bytes by category, and collects snapshots (`moments`) of them."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.moments: list[PredictedMoment] = []
        self.action = ""

    def add(self, category: str, size: int) -> None:
        """Add `size` bytes to a category."""
        self.held[category] = self.held.get(category, 0) + size

    def drop(self, category: str, size: int) -> None:
        """Subtract `size` bytes from a category, which must not fall below zero."""
        self.add(category, -size)
        assert self.held[category] >= 0, f"{category} is below zero at {self.action}"

    def spike(self, category: str, size: int) -> _Spike:
        """Return a context manager that counts `size` more bytes inside of its `with` block."""
        return _Spike(self, category, size)

    def note(self, operation: str) -> None:
        """Record a snapshot of the present bytes, taken during `operation` of the current
        action."""
        sizes = {category: size for category, size in self.held.items() if size}
        self.moments.append(PredictedMoment(self.action, operation, sizes))


class _Spike:
    """Counts bytes inside a `with` block; a class, because a simulated step enters thousands of
    them."""

    def __init__(self, count: ByteCount, category: str, size: int) -> None:
        self.count, self.category, self.size = count, category, size

    def __enter__(self) -> None:
        self.count.add(self.category, self.size)

    def __exit__(self, *_: object) -> None:
        self.count.drop(self.category, self.size)
