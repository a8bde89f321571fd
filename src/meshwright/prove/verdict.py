"""`Verdict`: one claim, what was expected and observed, and where the two part. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Divergence:
    """Where two computations first differ: in the order in which gradients come to be.

    `rank` is the first rank whose own shard differs; `microbatch` the first whose contribution
    does, None where each alone agrees.
    """

    tensor: str
    rank: int
    stage: int
    microbatch: int | None
    error: float


@dataclass(frozen=True)
class Verdict:
    """One claim held against what was observed; `observed` and `expected` are numbers or texts."""

    claim: str
    layout: Mapping[str, Any]
    expected: Any
    observed: Any
    tolerance: float | None
    passed: bool
    first_divergence: Divergence | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        return asdict(self)
