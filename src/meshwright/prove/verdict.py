"""`Verdict`: the result of checking one claim about a layout, and the place of the first
difference. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

# In the order in which a step computes them
Quantity = Literal[
    "initial weight",
    "output",
    "gradient",
    "gradient norm",
    "update",
    "router correction",
    "optimizer state",
]


@dataclass(frozen=True)
class Divergence:
    """The place where a parallel run first differs from one device, in the order of computation.

    `quantity` says what of `tensor` differs; `tensor` is a parameter's name, or a module's for an
    output. `rank` is the first rank whose own shard differs. `microbatch` and `data_rank` are the
    first whose sequences alone give a wrong gradient; None if each alone is right. `step`, from 1,
    is the first step that differs, if the first step's gradients agree.
    """

    tensor: str
    rank: int
    stage: int
    microbatch: int | None
    error: float
    quantity: Quantity = "gradient"
    data_rank: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        where = [f"rank {self.rank}", f"stage {self.stage}"]
        if self.microbatch is not None:
            where.append(f"microbatch {self.microbatch}")
        if self.data_rank is not None:
            where.append(f"rows of data rank {self.data_rank}")
        if self.step is not None:
            where.append(f"step {self.step}")
        return f"{self.quantity} of {self.tensor} on {', '.join(where)} (off by {self.error:.1e})"


@dataclass(frozen=True)
class Verdict:
    """The result of checking one claim about a layout: expected and observed numbers or texts, and
    whether they agree.
    """

    claim: str
    layout: Mapping[str, Any]
    expected: Any
    observed: Any
    tolerance: float | None
    passed: bool
    first_divergence: Divergence | None = None

    @property
    def error(self) -> float | None:
        """The relative error that was compared with the tolerance, the largest of several; None if
        the claim has no tolerance.
        """
        if self.tolerance is None:
            return None
        if isinstance(self.observed, list | tuple):  # not a text: that is a number beyond JSON
            return max(map(relative_error, self.observed, self.expected))
        return float(self.observed)

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON-ready values; NaN and infinities become strings."""
        ready: dict[str, Any] = _finite(asdict(self))
        return ready

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Verdict:
        """Return the verdict that `as_dict` converted."""
        where = values["first_divergence"]
        if where is not None:
            where = Divergence(**{**where, "error": float(where["error"])})
        bound = values["tolerance"]
        bound = None if bound is None else float(bound)
        return cls(**{**values, "tolerance": bound, "first_divergence": where})


def relative_error(actual: float | str, expected: float | str) -> float:
    """Return `|actual - expected| / |expected|`; strings such as "nan" are read as numbers."""
    actual, expected = float(actual), float(expected)
    return abs(actual - expected) / max(abs(expected), 1e-12)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
