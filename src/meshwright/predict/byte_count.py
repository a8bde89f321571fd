"""`ByteCount`: bytes held now, by category, and the moments that were worth a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple


class PredictedMoment(NamedTuple):
    """What is held at a moment: in which action of the table, while which operation works."""

    action: str
    what: str
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.held.values())


class ByteCount:
    """A count of bytes by category that only goes where it is told."""

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

    @contextmanager
    def spike(self, category: str, size: int) -> Iterator[None]:
        """Count bytes for as long as something works."""
        self.add(category, size)
        yield
        self.drop(category, size)

    def note(self, what: str) -> None:
        """Enter a moment."""
        held = {category: size for category, size in self.held.items() if size}
        self.moments.append(PredictedMoment(self.action, what, held))
