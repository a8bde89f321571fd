"""`RunRecord`: the contents of a run folder, even if incomplete or by an older version.

Missing parts are described in words, so that a page can show the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from meshwright.cost.catalogue import Cluster
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.files import read_text
from meshwright.layout import Layout
from meshwright.parsing import parse_json
from meshwright.planner.plan import cost_inputs_of
from meshwright.program.events import Events
from meshwright.program.lower import Program, lower
from meshwright.program.profile import StepProfile, from_json, of_source
from meshwright.spec.loading import Config, load_config
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import OptimizerSpec, TrainSpec

_OF_A_RUN: Final = ("plan.json", "events.jsonl")


@dataclass(frozen=True)
class RunRecord:
    """What is known of a run; `missing` says what is not known, and why.

    `values` are the config's, by section and key. `program` and `cluster` are None if the config
    can no longer be read.
    """

    path: Path
    values: Mapping[str, Mapping[str, Any]]
    origins: Mapping[str, str]
    layout: Layout | None
    program: Program | None
    cluster: Cluster | None
    machine: Mapping[str, Any]
    events: tuple[Mapping[str, Any], ...]
    profiles: tuple[StepProfile, ...]
    missing: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the run folder, with links resolved."""
        return self.path.resolve().name

    @property
    def start(self) -> Mapping[str, Any]:
        """The last "start" event; empty if there is none."""
        return self.last("start")

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """The "step" events in order of steps; the last one for a repeated step."""
        return self.by_step("step")

    @property
    def planned(self) -> StepProfile | None:
        """The predicted step profile, or None."""
        return of_source(self.profiles, "predicted")

    @property
    def measured(self) -> StepProfile | None:
        """The measured step profile, or None."""
        return of_source(self.profiles, "measured")

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the events of a kind, such as "step"."""
        return [event for event in self.events if event.get("event") == kind]

    def last(self, kind: str) -> Mapping[str, Any]:
        """Return the last event of a kind; empty if there is none."""
        events = self.of(kind)
        return events[-1] if events else {}

    def by_step(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the events of a kind in order of steps; the last one for a repeated step."""
        last_events = {e["step"]: e for e in self.of(kind) if isinstance(e.get("step"), int)}
        return [last_events[step] for step in sorted(last_events)]


def read_run(path: Path) -> RunRecord:
    """Return the record of a run folder; raises `ConfigError` if it is not one."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a run folder: there is no such folder")
    if not any((path / name).is_file() for name in _OF_A_RUN):
        raise ConfigError(f"{path} is not a run folder: {' and '.join(_OF_A_RUN)} are missing")
    missing: list[str] = []
    plan = _document(path / "plan.json", missing, "which layout it had")
    origins = _document(path / "provenance.json", missing, "where its values came from")
    config = _config(path, missing)
    values = config.model_dump(mode="json") if config else dict(plan.get("config", {}))
    layout = _layout(plan, missing)
    events = _events(path / "events.jsonl", missing)
    return RunRecord(
        path,
        values,
        {key: str(origin) for key, origin in origins.items()},
        layout,
        _program(values, layout, missing),
        _cluster(config, layout),
        plan.get("machine", {}),
        events,
        _profiles(path / "ledger.json", missing),
        tuple(missing),
    )


def _document(path: Path, missing: list[str], tells: str) -> dict[str, Any]:
    try:
        document = parse_json(read_text(path))
    except FileNotFoundError:
        missing.append(f"{path.name} is not there: it tells {tells}.")
    except (OSError, ValueError) as error:
        missing.append(f"{path.name} cannot be read ({error}): it tells {tells}.")
    else:
        if isinstance(document, dict):
            return document
        missing.append(f"{path.name} is not what it should be: it tells {tells}.")
    return {}


def _config(path: Path, missing: list[str]) -> Config | None:
    try:
        return load_config(path / "config.toml")
    except (MeshwrightError, OSError, ValueError) as error:
        missing.append(f"config.toml cannot be read by this version: {error}")
    return None


def _layout(plan: Mapping[str, Any], missing: list[str]) -> Layout | None:
    try:
        return Layout(**plan["layout"]) if "layout" in plan else None
    except (ValidationError, TypeError):
        missing.append("The layout in plan.json is of another version, and cannot be drawn.")
        return None


def _program(
    values: Mapping[str, Any], layout: Layout | None, missing: list[str]
) -> Program | None:
    if layout is None:
        return None
    try:
        return lower(
            ModelSpec(**values["model"]),
            TrainSpec(**values["train"]),
            OptimizerSpec(**values["optimizer"]),
            layout,
        )
    except (ValidationError, KeyError, TypeError, MeshwrightError):
        missing.append("The config is of another version: what each rank holds is not shown.")
        return None


def _cluster(config: Config | None, layout: Layout | None) -> Cluster | None:
    if config is None or layout is None:
        return None
    try:
        return cost_inputs_of(config, local_devices=layout.world).cluster
    except ConfigError:
        return None


def _events(path: Path, missing: list[str]) -> tuple[Mapping[str, Any], ...]:
    """Return the run's events without damaged or unfinished lines, which `missing` mentions."""
    try:
        events = Events.read(path)
    except OSError:
        missing.append("events.jsonl is not there: the run ended before its first step.")
        return ()
    if events.bad:
        lost = "one line" if events.bad == 1 else f"{events.bad} lines"
        missing.append(f"events.jsonl was cut off or damaged: {lost} cannot be read.")
    return tuple(events)


def _profiles(path: Path, missing: list[str]) -> tuple[StepProfile, ...]:
    not_shown = "timeline, memory over a step, causes and messages are not shown"
    try:
        profiles = from_json(parse_json(read_text(path)))
    except FileNotFoundError:
        missing.append(
            f"ledger.json is not there: the run recorded no step, or was made by an older version; "
            f"{not_shown}."
        )
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        missing.append(f"ledger.json cannot be read ({error}): {not_shown}.")
        return ()
    if of_source(profiles, "measured") is None:
        missing.append("No step was recorded: what was predicted is shown alone.")
    return profiles


def differing(records: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """Return each config key in which the runs differ, with its value in each run.

    Layout keys are those of the resolved layout.
    """
    keys: dict[str, None] = {}
    for record in records:
        for section, section_values in _told(record).items():
            keys |= dict.fromkeys(f"{section}.{key}" for key in section_values)
    rows = []
    for name in keys:
        section, _, key = name.partition(".")
        run_values = [_told(record).get(section, {}).get(key) for record in records]
        if any(value != run_values[0] for value in run_values) and name not in (
            "log.name",
            "log.dir",
        ):
            rows.append((name, run_values))
    return rows


def _told(record: RunRecord) -> dict[str, Mapping[str, Any]]:
    values = dict(record.values)
    if record.layout is not None:
        values["layout"] = {**values.get("layout", {}), **record.layout.model_dump(mode="json")}
    return values
