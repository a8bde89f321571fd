"""Reads a saved plan for a run, if the program is still the planned one, and compares two plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import ConfigError
from meshwright.files import read_text
from meshwright.layout import Layout
from meshwright.parsing import foreign, parse_json
from meshwright.planner.choices import CompileChoice, decided
from meshwright.planner.plan import digest
from meshwright.spec.loading import Config, load_config

# What a program is made of besides the layout, as the digest has it.
_OF_TRAINING = ("batch", "seq_len", "precision")


def load_planned(
    plan: Path, config: Path | None = None, overrides: Iterable[str] = (), needed: str = "--plan"
) -> Config:
    """Return the config of a run that uses the layout of a saved plan.

    Without a config file, the plan's own config applies; with one, only its layout and devices do.
    `needed` is the flag that named the plan, for messages. Raises `ConfigError` if it is not a
    plan, has no layout, or if model, batch, sequence length, precision or layout differ from the
    plan's.
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
    """Return the config with the origin "default" for those of `keys` whose value the plan
    supplied."""
    unnamed = {key: "default" for key in keys if config.origins.get(key) == "plan"}
    return config.model_copy(update={"origins": {**config.origins, **unnamed}})


def read_plan(plan: Path, needed: str) -> dict[str, Any]:
    """Return the JSON of a file that `plan --save` wrote; `needed` is the flag that named it.

    Raises `ConfigError` if the file cannot be read, is not a plan, or has no layout.
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
    """Return texts for the keys of model, training and layout whose values differ from the
    plan's."""
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


# Of what a plan was made of, in this order.
_SECTIONS = ("model", "train", "cluster", "optimizer", "data")
# Causes and categories below this share of the whole are not told.
_LEAST = 0.005


class ChangedKey(NamedTuple):
    """A key whose value differs between two plans, with both values."""

    key: str
    before: Any
    after: Any


class PlanDifference(NamedTuple):
    """The differences of two plans: config keys, layout keys, and predicted time and memory.

    `totals` has (before, after) for step time, throughput, MFU and peak memory. `seconds` and
    `bytes` map a cause, or a category of memory, to both values, the largest change first.
    `explanation` says the same in sentences.
    """

    asked: list[ChangedKey]
    layout: list[ChangedKey]
    totals: dict[str, tuple[float, float]]
    seconds: dict[str, tuple[float, float]]
    bytes: dict[str, tuple[float, float]]
    explanation: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return the differences as JSON."""

        def both(values: Mapping[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
            return {key: {"before": a, "after": b} for key, (a, b) in values.items()}

        return {
            "asked": [change._asdict() for change in self.asked],
            "layout": [change._asdict() for change in self.layout],
            **both(self.totals),
            "seconds": both(self.seconds),
            "memory_bytes": both(self.bytes),
            "why": self.explanation,
        }


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> PlanDifference:
    """Return the differences of two plans, given as the JSON of `plan --save`; each must have a
    layout."""
    asked = [
        change
        for section in _SECTIONS
        for change in _key_changes(
            before["config"][section], after["config"][section], f"{section}."
        )
    ]
    asked += _key_changes(
        {"calibration": before["calibration"]}, {"calibration": after["calibration"]}
    )
    devices = before["cluster"], after["cluster"]
    asked += [
        change
        for change in _key_changes(*devices, "cluster.")
        if change.key not in {a.key for a in asked}
    ]
    layout = _key_changes(before["layout"], after["layout"], "layout.")
    first, second = before["ledger"], after["ledger"]
    keys = ("step_time_s", "tokens_per_s", "mfu", "peak_memory_bytes")
    totals = {key: (float(first[key]), float(second[key])) for key in keys}
    seconds = _sizes(first["seconds"], second["seconds"])
    memory = _sizes(first["memory_bytes"], second["memory_bytes"])
    return PlanDifference(asked, layout, totals, seconds, memory, _why(totals, seconds, memory))


def _key_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> list[ChangedKey]:
    keys = dict.fromkeys((*before, *after))
    return [
        ChangedKey(f"{prefix}{key}", before.get(key), after.get(key))
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _sizes(
    before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    pairs = {
        name: (float(before.get(name, 0.0)), float(after.get(name, 0.0)))
        for name in dict.fromkeys((*before, *after))
    }
    return dict(sorted(pairs.items(), key=lambda item: -abs(item[1][1] - item[1][0])))


def _why(
    totals: Mapping[str, tuple[float, float]],
    seconds: Mapping[str, tuple[float, float]],
    memory: Mapping[str, tuple[float, float]],
) -> list[str]:
    before, after = totals["step_time_s"]
    sentences = []
    if before != after:
        word = "faster" if after < before else "slower"
        sentences.append(
            f"the step is {abs(after / before - 1):.1%} {word}: {_most(seconds, before, 's')}"
        )
    before, after = totals["peak_memory_bytes"]
    if before != after:
        word = "less" if after < before else "more"
        sentences.append(
            f"the largest rank holds {abs(after / before - 1):.1%} {word}: "
            f"{_most(memory, before, 'GiB')}"
        )
    return sentences or ["nothing that is predicted differs"]


def _most(sizes: Mapping[str, tuple[float, float]], total: float, unit: str) -> str:
    scale = 2**30 if unit == "GiB" else 1
    changes = [
        f"{name} {(after - before) / scale:+.3g} {unit}"
        for name, (before, after) in sizes.items()
        if abs(after - before) > _LEAST * total
    ]
    return ", ".join(changes[:4]) or "a little of each"
