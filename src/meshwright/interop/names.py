"""The names of model presets in other trainers, from `models.toml`."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from meshwright.interop.source import ImportSource

_SETTLES = ("model.preset", "model.init_from")


class ModelNames(BaseModel):
    """The names of a preset in other trainers; empty if they lack it.

    `hub` are repositories on the Hugging Face hub, of which written configs name the first;
    `torchtitan` is a module and a flavor, `bridge` the beginning of a recipe's name in
    Megatron-Bridge.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hub: tuple[str, ...] = ()
    torchtitan: tuple[str, ...] = ()
    bridge: str = ""


@lru_cache(maxsize=1)
def model_names() -> dict[str, ModelNames]:
    """Return the names in other trainers, by preset."""
    text = (files(__package__) / "models.toml").read_text(encoding="utf-8")
    return {name: ModelNames.model_validate(row) for name, row in tomllib.loads(text).items()}


def names_of(preset: str | None) -> ModelNames:
    """Return the names of a preset; empty ones for None or an unknown preset."""
    return model_names().get(preset or "", ModelNames())


def read_hub_name(source: ImportSource, key: str) -> None:
    """Import the model in a key: a folder with a config.json, or a repository on the hub."""
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
    source.refuse(
        key, f"{reason}model.init_from with the model's folder or Hub id", settled_by=_SETTLES
    )


def need_model(source: ImportSource, key: str) -> None:
    """Mark `key` as unsupported if no model is named by the file, the base config or the user."""
    known = any(source.target(name) is not None for name in (*_SETTLES, "model.dim"))
    if not known and source.get(key) is None:
        reason = (
            "the file names no model; nearest: model.preset, or model.init_from with its folder"
        )
        source.refuse(key, reason, settled_by=_SETTLES, default="(none)")
