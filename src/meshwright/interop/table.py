"""The tables of known keys of other systems: `deepspeed.toml`, `gpt_neox.toml`, and so on.

A row determines the verdict on a key, by the first of these fields that applies:

- `same`: values that ask for what Meshwright does anyway, and the `reason` for it;
- `ignored`: why the key has no effect here;
- `to`: the Meshwright key that it sets, through `values` if these differ; `but` says what
  differs; the names of optimizers are those of `spec.optimizers`;
- `unsupported`: why it is not supported. `changes`: without it something else would be trained.

`default` is what the other system does if the key is omitted, provided that `given_with` (another
key) is in the file; it sets `to` too. `by_rule` marks keys that code imports. `*` in a key stands
for any part of a name.
"""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from meshwright.spec.optimizers import OPTIMIZERS


class KeyRow(BaseModel):
    """The row of one key of another system; the module's docstring explains its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    same: tuple[Any, ...] = ()
    reason: str = ""
    ignored: str = ""
    to: str = ""
    values: dict[str, Any] | None = None
    but: str = ""
    unsupported: str = ""
    changes: bool = False
    default: Any = None
    given_with: str = ""
    by_rule: bool = False


class Table(BaseModel):
    """The rows of a system, and which of its keys have no effect unless switched on.

    `switched` are sections with a key `enabled`, by default off; `switches` maps patterns of keys
    to the key that switches them on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    switched: tuple[str, ...] = ()
    switches: dict[str, str] = {}
    rows: dict[str, KeyRow]

    def find(self, key: str) -> KeyRow | None:
        """Return the row of a key, else of the longest pattern that matches it, else None."""
        if key in self.rows:
            return self.rows[key]
        patterns = [name for name in self.rows if "*" in name and fnmatchcase(key, name)]
        return self.rows[max(patterns, key=len)] if patterns else None


def load_table(name: str) -> Table:
    """Return the shipped table of a system, such as `deepspeed`."""
    content: dict[str, Any] = tomllib.loads(
        (files(__package__) / f"{name}.toml").read_text(encoding="utf-8")
    )
    for row in content["rows"].values():
        if row.get("to") == "optimizer.name":
            row["values"] = _names_of_optimizers(name)
    return Table.model_validate(content)


# Trainers that pass the name on to transformers.
_OF_TRANSFORMERS: Final = ("axolotl", "transformers")


def _names_of_optimizers(system: str) -> dict[str, str]:
    """Return the Meshwright name of each optimizer, by the system's name for it."""
    origin = "hf" if system in _OF_TRANSFORMERS else system
    return {
        foreign_name: optimizer.name
        for optimizer in OPTIMIZERS.values()
        for foreign_name in optimizer.names.get(origin, ())
    }
