"""The tables of known keys: `deepspeed.toml`, `gpt_neox.toml`, `megatron.toml`, `hf.toml`.

A row says what becomes of a key, in this order:

- `same`: values that ask for what Meshwright does anyway, and the `reason` for it;
- `ignored`: why the key does not matter here;
- `to`: the Meshwright key that it sets, through `values` where they have other names; `but` says
  what differs; the names of optimizers are those of `spec.optimizers`;
- `unsupported`: why it cannot be had. `changes`: without it something else would be trained.

`default` is what the other system does where the key is left out, if `given_with` (another key of
the file) is there; it sets `to` too. `*` in a key stands for any part of a name.
"""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from meshwright.spec.optimizers import OPTIMIZERS


class KeyRow(BaseModel):
    """One key of another system; the module's docstring has the fields."""

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
    """The rows of a system, and what does nothing unless it is switched on.

    `switched` are sections whose key `enabled` does so; `switches` has the switch of keys that
    match a pattern.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    switched: tuple[str, ...] = ()
    switches: dict[str, str] = {}
    rows: dict[str, KeyRow]

    def find(self, key: str) -> KeyRow | None:
        """Return the row of a key: its own, else that of the longest pattern."""
        if key in self.rows:
            return self.rows[key]
        patterns = [name for name in self.rows if "*" in name and fnmatchcase(key, name)]
        return self.rows[max(patterns, key=len)] if patterns else None


def load_table(name: str) -> Table:
    """Return a table that is shipped, such as `deepspeed`."""
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
    """Return what a system calls the optimizers that there are."""
    origin = "hf" if system in _OF_TRANSFORMERS else system
    return {
        foreign_name: optimizer.name
        for optimizer in OPTIMIZERS.values()
        for foreign_name in optimizer.names.get(origin, ())
    }
