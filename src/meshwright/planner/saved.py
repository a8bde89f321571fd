"""A saved plan, read back for a run if the program is still the planned one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.files import read_text
from meshwright.layout import Layout
from meshwright.parsing import foreign, parse_json
from meshwright.planner.compiling import CompileChoice, decided
from meshwright.planner.plan import digest
from meshwright.spec.loading import Config, load_config

# What a program is made of besides the layout, as the digest has it.
_OF_TRAINING = ("batch", "seq_len", "precision")


def load_planned(
    plan: Path, config: Path | None = None, overrides: Iterable[str] = (), needed: str = "--plan"
) -> Config:
    """Return the config of a saved plan's run, with its layout of origin "plan".

    Without a config file, the plan's own config applies, too; with one, the devices are the plan's.
    Raises `ConfigError` if the file is no plan or has no layout, or if the program differs from the
    planned one.
    """
    with foreign(f"{needed} {plan}", ConfigError):
        return _planned(plan, config, overrides, needed)


def _planned(plan: Path, config: Path | None, overrides: Iterable[str], needed: str) -> Config:
    saved = read_plan(plan, needed)
    layout = {"auto": False, **saved["layout"]}
    cluster = saved["config"]["cluster"]
    # Whoever starts it looks whether they are there.
    planned = {key: cluster[key] for key in ("preset", "device") if key in cluster}
    sections: dict[str, Mapping[str, Any]] = {"layout": layout, "cluster": planned}
    if config is None:
        sections = {**_without_none(saved["config"]), "layout": layout}
    loaded = load_config(config, overrides, plan=sections)
    if config is None:
        loaded = _as_unnamed(loaded, saved.get("unnamed", []))
    values = loaded.layout.model_dump(exclude={"auto"})
    resolved_layout = Layout(**{key: value for key, value in values.items() if value is not None})
    if digest(loaded, resolved_layout) != saved["digest"]:
        changes = (
            "; ".join(_changes(loaded, resolved_layout, saved)) or "its files were written by hand"
        )
        raise ConfigError(
            f"{needed} {plan}: the program is not the one that was planned: {changes}. Plan again "
            "with `meshwright plan --save`, or train without --plan"
        )
    compiles = saved["config"]["train"].get("compile")
    if loaded.train.compile == "auto" and isinstance(compiles, bool):
        loaded = decided(loaded, CompileChoice(compiles, f"as {plan} has it"))
    return loaded


def _as_unnamed(config: Config, keys: Iterable[str]) -> Config:
    """Return a plan's config with the origin "default" for keys that nobody has named so far."""
    unnamed = {key: "default" for key in keys if config.origins.get(key) == "plan"}
    return config.model_copy(update={"origins": {**config.origins, **unnamed}})


def read_plan(plan: Path, needed: str) -> dict[str, Any]:
    """Return a plan of `plan --save` that has a layout; `needed` is the flag that names it.

    Raises `ConfigError` for anything else.
    """
    try:
        saved = parse_json(read_text(plan))
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{needed} {plan} cannot be read: {problem}") from None
    keys = ("config", "layout", "digest")
    if not isinstance(saved, dict) or not all(key in saved for key in keys):
        raise ConfigError(f"{needed} {plan} is not a plan of `meshwright plan --save`")
    if saved["layout"] is None:
        raise ConfigError(f"{needed} {plan} has no layout: none fitted")
    return saved


def _without_none(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in config.items()
    }


def _changes(config: Config, layout: Layout, saved: Mapping[str, Any]) -> list[str]:
    """Return what differs from the plan, key by key."""
    pairs = {
        "model": (config.model.identity(), saved["config"]["model"]),
        "train": (
            config.train.model_dump(mode="json", include=set(_OF_TRAINING)),
            saved["config"]["train"],
        ),
        "layout": (layout.model_dump(mode="json"), saved["layout"]),
    }
    return [
        f"{section}.{key} = {value}, planned with {old.get(key)}"
        for section, (new, old) in pairs.items()
        for key, value in new.items()
        if value != old.get(key)
    ]
