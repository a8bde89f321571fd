"""`Finding`: one thing that `doctor` looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; "bad" is in the way of a run, a "note" is not."""

    name: str
    text: str
    state: State = "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        return asdict(self)
