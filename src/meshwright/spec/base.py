"""`Spec`: the base of all specs."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict

# Far above what anybody trains: a program has a row for each layer, microbatch and rank.
LARGEST: Final = 2**31 - 1


class Spec(BaseModel):
    """Base of all specs: frozen, strict types, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )


def as_tuple(value: object) -> object:
    """Convert a list from a TOML or JSON file to a tuple."""
    return tuple(value) if isinstance(value, list) else value
