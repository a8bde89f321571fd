"""What an import says of every key of the files that it read."""

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

    `to` are the Meshwright keys that it sets, by name. `note` says what differs, why the key does
    not matter, or why it cannot be had and what is nearest. `changes` marks an unsupported key
    without which something else would be trained: it refuses the import until it is accepted by
    name, or one of the keys in `settled_by` is given by the user. `is_default` marks what the
    other system does where the file is silent. `is_final` marks a key that cannot be accepted.
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
        """Return whether the import must not go on because of this key."""
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
    """A Meshwright key that the files imply: a default of the other system, or arithmetic.

    A default gives way to the base config; what follows from the files' own numbers does not.
    """

    key: str
    value: Any
    reason: str
    is_default: bool = True


@dataclass(frozen=True)
class Report:
    """Every key of the files once, and the keys that were filled in."""

    system: str
    files: tuple[str, ...]
    entries: tuple[KeyReport, ...]
    filled: tuple[Filled, ...]
    refused: tuple[KeyReport, ...]

    def count(self, verdict: Verdict) -> int:
        """Return how many keys of the files have a verdict."""
        return sum(e.verdict == verdict and not e.is_default for e in self.entries)

    @property
    def keys(self) -> int:
        """Return how many keys the files have."""
        return sum(not e.is_default for e in self.entries)

    @property
    def share(self) -> float:
        """Return the share of the keys that take effect: honoured or translated."""
        return (self.count("honoured") + self.count("translated")) / max(1, self.keys)

    def as_json(self) -> dict[str, Any]:
        """Return the report as data."""
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
