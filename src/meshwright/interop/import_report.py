"""The report of an import: a verdict on every key of the files that were read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["honoured", "translated", "ignored", "unsupported", "contradictory"]
VERDICTS: tuple[Verdict, ...] = (
    "honoured",
    "translated",
    "ignored",
    "unsupported",
    "contradictory",
)


@dataclass(frozen=True)
class KeyReport:
    """The verdict on one key of the files.

    `to` are the Meshwright keys that it sets, with their values. `note` says what differs, why the
    key has no effect, or why it is unsupported and what is nearest. `changes` marks an unsupported
    key without which something else would be trained: the import is refused unless the user accepts
    the key, or sets one of the keys in `settled_by`. `is_default` marks a default of the other
    system for a key that the files lack. `is_final` marks a key that cannot be accepted.
    """

    key: str
    value: Any
    verdict: Verdict
    to: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    changes: bool = False
    settled_by: tuple[str, ...] = ()
    is_default: bool = False
    is_final: bool = False

    def refuses(self, accepted: Sequence[str], given: Sequence[str]) -> bool:
        """Return whether the import must be refused because of this key.

        `accepted` are the keys that the user accepts to lose ("all": every one), `given` the
        Meshwright keys that the user has set.
        """
        if self.verdict == "contradictory":
            return not any(key in given for key in self.settled_by)
        if self.verdict != "unsupported" or not self.changes:
            return False
        if self.is_final:
            return True
        is_settled = any(key in given for key in self.settled_by)
        return not (is_settled or self.key in accepted or "all" in accepted)


@dataclass(frozen=True)
class Filled:
    """A Meshwright key that the files imply, as a default of the other system or by arithmetic.

    A default has lower precedence than the base config; what follows from the files' own numbers
    has higher.
    """

    key: str
    value: Any
    reason: str
    is_default: bool = True


@dataclass(frozen=True)
class Report:
    """The result of an import: a verdict for each key, and the keys that were filled in."""

    system: str
    files: tuple[str, ...]
    entries: tuple[KeyReport, ...]
    filled: tuple[Filled, ...]
    refused: tuple[KeyReport, ...]

    def count(self, verdict: Verdict) -> int:
        """Return how many keys of the files have a given verdict."""
        return sum(e.verdict == verdict and not e.is_default for e in self.entries)

    @property
    def keys(self) -> int:
        """The number of keys in the files."""
        return sum(not e.is_default for e in self.entries)

    @property
    def share(self) -> float:
        """The share of keys that take effect: those honoured or translated."""
        return (self.count("honoured") + self.count("translated")) / max(1, self.keys)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "system": self.system,
            "files": list(self.files),
            "keys": [
                {
                    "key": entry.key,
                    "value": entry.value,
                    "verdict": entry.verdict,
                    "to": dict(entry.to),
                    "note": entry.note,
                    "left_out": entry.is_default,
                    "refuses": entry in self.refused,
                }
                for entry in self.entries
            ],
            "filled": [{"key": f.key, "value": f.value, "why": f.reason} for f in self.filled],
            "counts": {verdict: self.count(verdict) for verdict in VERDICTS},
            "share": round(self.share, 4),
            "is_refused": bool(self.refused),
        }
