"""`Finding`: the result of one of `doctor`'s checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """The result of one check; "bad" prevents a run, a "note" does not."""

    name: str
    text: str
    state: State = "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        return asdict(self)
