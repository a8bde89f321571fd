"""`ByteCount`: the bytes currently held, by category, and the recorded moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PredictedMoment(NamedTuple):
    """The bytes held at a moment: during which action of the table and which operation."""

    action: str
    what: str
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.held.values())


class ByteCount:
    """A count of bytes by category."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.moments: list[PredictedMoment] = []
        self.action = ""

    def add(self, category: str, size: int) -> None:
        """Count more bytes."""
        self.held[category] = self.held.get(category, 0) + size

    def drop(self, category: str, size: int) -> None:
        """Count fewer bytes."""
        self.add(category, -size)
        assert self.held[category] >= 0, f"{category} is below zero at {self.action}"

    def spike(self, category: str, size: int) -> _Spike:
        """Count bytes only for the body of a `with` statement."""
        return _Spike(self, category, size)

    def note(self, operation: str) -> None:
        """Record a moment."""
        sizes = {category: size for category, size in self.held.items() if size}
        self.moments.append(PredictedMoment(self.action, operation, sizes))


class _Spike:
    """Bytes that are counted within a `with`; a class, as a walk enters thousands of them."""

    def __init__(self, count: ByteCount, category: str, size: int) -> None:
        self.count, self.category, self.size = count, category, size

    def __enter__(self) -> None:
        self.count.add(self.category, self.size)

    def __exit__(self, *_: object) -> None:
        self.count.drop(self.category, self.size)
