"""The tables of known keys, one for each system, and of the names of models: `models.toml`.

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
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from meshwright.interop.source import ImportSource
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


_SETTLES = ("model.preset", "model.init_from")


class ModelNames(BaseModel):
    """What others call a preset; empty where they do not have it.

    `hub` are repositories of the Hugging Face hub, the first of which a written config names;
    `torchtitan` is a module and a flavor, `bridge` the stem of a recipe of Megatron-Bridge.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hub: tuple[str, ...] = ()
    torchtitan: tuple[str, ...] = ()
    bridge: str = ""


@lru_cache(maxsize=1)
def model_names() -> dict[str, ModelNames]:
    """Return the names of each preset that others have, by preset."""
    text = (files(__package__) / "models.toml").read_text(encoding="utf-8")
    return {name: ModelNames.model_validate(row) for name, row in tomllib.loads(text).items()}


def names_of(preset: str | None) -> ModelNames:
    """Return the names of a preset; empty ones for a model without."""
    return model_names().get(preset or "", ModelNames())


def read_hub_name(source: ImportSource, key: str) -> None:
    """Take the model that a key names: a folder with a config.json, or a repository of the hub."""
    name = source.get(key)
    if name is None:
        return
    if (Path(str(name)) / "config.json").is_file():
        source.translate(key, {"model.init_from": str(name)})
        return
    for preset, names in model_names().items():
        if str(name).lower() in (hub_name.lower() for hub_name in names.hub):
            source.translate(key, {"model.preset": preset})
            return
    reason = "no preset has this name, and there is no such folder; nearest: model.preset, or "
    source.refuse(key, f"{reason}model.init_from with the model's folder", settled_by=_SETTLES)


def need_model(source: ImportSource, key: str) -> None:
    """Refuse a file that names no model, unless the base config or the user does."""
    known = any(source.target(name) is not None for name in (*_SETTLES, "model.dim"))
    if not known and source.get(key) is None:
        reason = (
            "the file names no model; nearest: model.preset, or model.init_from with its folder"
        )
        source.refuse(key, reason, settled_by=_SETTLES, default="(none)")
