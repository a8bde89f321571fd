"""`plan --for` and `plan --like`: plans for other trainers, to and from their config files."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshwright.cli.common import read_words, say, say_command
from meshwright.cli.imports import summary
from meshwright.cost.calibration import Calibration
from meshwright.cost.catalogue import resolve_cluster
from meshwright.cost.price import Prediction, RankMemory, memories
from meshwright.errors import ConfigError, refusal
from meshwright.files import write_atomic
from meshwright.interop.export import Written, keys_of, layout_of, written
from meshwright.interop.import_report import KeyReport, Report
from meshwright.interop.importing import Imported, import_files, refusal_text
from meshwright.interop.plan_source import PlanSource
from meshwright.interop.trainers import TRAINERS, Trainer, trainer_named
from meshwright.layout import Layout
from meshwright.planner.for_trainer import freed, priced_as
from meshwright.planner.plan import Plan, check_legal, cost_inputs_of, explain, prediction_json
from meshwright.runtime.machines.machine import detect
from meshwright.spec.hf_shapes import is_trainable
from meshwright.spec.loading import KEYS, Config, build_config, load_config, read_given
from meshwright.spec.resolve import Values
from meshwright.spec.stored import HF_CONFIG, read_object
from meshwright.units import format_bytes, format_seconds

# Sections of a config that a layout and its memory follow from.
_PLANNED: Final = ("model", "layout", "cluster", "lora")
_PLANNED_KEYS: Final = frozenset(
    {
        *("train.batch", "train.seq_len", "train.precision", "train.fp8", "train.compile"),
        *("train.reduce_dtype", "train.async_tp", "train.expert_capacity", "optimizer.name"),
        *("optimizer.state_dtype", "train.master"),
    }
)
_OUR_KEY: Final = re.compile(rf"\b(?:{'|'.join(KEYS)})\.[a-z_]+")
# Another layout has to be faster by so much to be worth a change: predictions are not exact.
_WORTH: Final = 0.02


class Like(NamedTuple):
    """Another trainer's config file: a report on its keys, and the config and layout it means."""

    path: Path
    report: Report
    config: Config
    layout: Layout | None


def read_like(args: argparse.Namespace) -> Like | None:
    """Return the config file in `--like`, with the command line's overrides; None without it."""
    if args.like is None:
        return None
    base, overrides = read_words(args)
    devices, is_fixed = _devices(base, overrides)
    accepted = [key for key in args.accept.split(",") if key]
    path = args.like
    if path.is_dir():
        path = path / HF_CONFIG
    if (shapes := _from_shapes(path, base, overrides)) is not None:
        return shapes
    imported = import_files(
        [path],
        base=base,
        overrides=overrides,
        devices=devices,
        is_fixed=is_fixed,
        accepted=accepted,
    )
    refused = [entry for entry in imported.report.refused if _is_planned(entry)]
    if refused:
        report = imported.report
        text = refusal_text(_with_refused(report, refused))
        raise ConfigError(text)
    config = build_config({name: dict(values) for name, values in imported.given.items()})
    layout = None if imported.report.system == "hf" else _layout(imported, config)
    return Like(path, imported.report, config, layout)


def _from_shapes(path: Path, base: Path | None, overrides: list[str]) -> Like | None:
    """Return the config of a model that can only be planned from its shapes; else None."""
    if path.name != HF_CONFIG or not path.is_file():
        return None
    content = read_object(path)
    if "model_type" not in content or is_trainable(content):
        return None
    arguments = [f"model.init_from={path.parent}", *overrides]
    report = Report("hf", (str(path),), (), (), ())
    return Like(path, report, load_config(base, arguments, plans=True), None)


def check_written(config: Config, trainer: Trainer | None) -> None:
    """Raise `ConfigError` if the model is known only by its shapes, so `--for` cannot write it."""
    if trainer is not None and config.model.planned is not None:
        name = config.model.planned.model_type
        rule = f"--for {trainer.name}: {name} is planned from its shapes, and cannot be written"
        raise ConfigError(refusal(rule, legal=["the plan without --for"]))


def _with_refused(report: Report, refused: list[KeyReport]) -> Report:
    return Report(report.system, report.files, report.entries, report.filled, tuple(refused))


def _is_planned(entry: KeyReport) -> bool:
    """Return whether layout or memory may depend on a key of another trainer's config.

    It is decided by the Meshwright keys that it sets or that its note names.
    """
    targets = [*entry.to, *entry.settled_by, *_OUR_KEY.findall(entry.note)]
    return not targets or any(
        target.partition(".")[0] in _PLANNED or target in _PLANNED_KEYS for target in targets
    )


def _devices(base: Path | None, overrides: list[str]) -> tuple[int, bool]:
    """Return the number of devices in the cluster, and whether the user has set it."""
    cluster = [word for word in overrides if word.startswith("cluster.")]
    stated = read_given(base, cluster)
    only: dict[str, Values] = {name: {} for name in stated}
    only["cluster"] = stated["cluster"]
    spec = build_config(only).cluster
    if spec.preset == "local":
        return detect(spec, os.environ).devices * spec.nodes, "devices_per_node" in stated[
            "cluster"
        ]
    is_fixed = bool(stated["cluster"].keys() & {"nodes", "devices_per_node"})
    return resolve_cluster(spec, 1).devices, is_fixed


def _layout(imported: Imported, config: Config) -> Layout:
    spec = config.cluster
    local = spec.devices_per_node or detect(spec, os.environ).devices
    return layout_of(imported, resolve_cluster(spec, local).devices)


def trainer_of(args: argparse.Namespace, like: Like | None) -> Trainer | None:
    """Return the trainer in `--for`, else that of the config in `--like`, if plans exist for it."""
    name = args.trainer or (like.report.system if like is not None else None)
    return trainer_named(name) if name in TRAINERS else None


def source_of(planned: Plan, layout: Layout) -> PlanSource:
    """Return what another trainer's config is written from: config, layout, nodes and devices."""
    cluster = planned.setting.cluster
    per_node = min(cluster.per_node, cluster.devices)
    return PlanSource(planned.config, layout, cluster.devices // per_node, per_node)


def config_file(args: argparse.Namespace, trainer: Trainer, planned: Plan) -> Written | None:
    """Return the best layout as the trainer's config, after writing it with `--save-config`.

    None if no layout fits.
    """
    if planned.best is None:
        return None
    name = str(args.save_config or f"plan{trainer.suffix}")
    file = written(trainer, source_of(planned, planned.best.layout), name)
    if args.save_config is not None:
        write_atomic(args.save_config, file.text.encode())
    return file


def file_json(trainer: Trainer, file: Written | None) -> dict[str, Any]:
    """Return a trainer and its config file as JSON values."""
    return {
        "trainer": trainer.name,
        "version": trainer.version,
        "priced_as": trainer.priced_as,
        "priced_why": trainer.priced_why,
        "config": None if file is None else dict(file.keys),
        "text": None if file is None else file.text,
        "notes": [] if file is None else file.notes,
        "command": None if file is None else file.command,
    }


def print_trainer(trainer: Trainer, planned: Plan) -> None:
    """Print the trainer of a plan, its version, and the system whose cost model prices it."""
    say(f"for {trainer.package} {trainer.version}: {trainer.file}")
    system = planned.setting.system.name
    reason = f": {trainer.priced_why}" if trainer.priced_why else ""
    say(f"note: priced as {system}{reason}")


def print_file(args: argparse.Namespace, file: Written | None) -> None:
    """Print the trainer's config, or where it was written, and the command that uses it."""
    if file is None:
        return
    for note in file.notes:
        say(f"note: {note}")
    if args.save_config is None:
        print()
        print(file.text, end="")
        print("\nto train the best, with --save-config FILE:")
    else:
        print(f"\nwritten to {args.save_config}; to train:")
    say_command(file.command)


class LikeComparison(NamedTuple):
    """Another trainer's layout compared with the best one: its price, and the keys to change.

    `over` are the pipeline ranks on which it does not fit; `faster` is None if nothing is.
    """

    theirs: Prediction
    over: list[RankMemory]
    faster: Prediction | None
    changes: list[str]


def priced(
    like: Like, trainer: Trainer | None, calibration: Calibration | None
) -> tuple[Prediction, list[RankMemory]]:
    """Return the price of the layout in another trainer's config.

    Also returns the memory of the pipeline ranks on which it does not fit.
    """
    assert like.layout is not None
    system = "meshwright" if trainer is None else priced_as(trainer, like.config)
    setting = cost_inputs_of(like.config, calibration, system=system)
    check_legal(setting, like.layout)
    prediction = explain(setting, like.layout)
    return prediction, [memory for memory in memories(setting, like.layout) if not memory.fits]


def compared(
    like: Like,
    trainer: Trainer | None,
    planned: Plan,
    prediction: Prediction,
    over: list[RankMemory],
) -> LikeComparison:
    """Return what is faster than another trainer's layout, and which of its keys to change."""
    best = planned.best
    if best is None or best.layout == prediction.layout:
        return LikeComparison(prediction, over, None, [])
    if prediction.memory.fits and best.time.total > (1 - _WORTH) * prediction.time.total:
        return LikeComparison(prediction, over, None, [])
    changes = _changes(like, trainer, planned, prediction.layout, best.layout)
    return LikeComparison(prediction, over, best, changes)


def _changes(
    like: Like, trainer: Trainer | None, planned: Plan, before: Layout, after: Layout
) -> list[str]:
    """Return each changed key with both values, under the trainer's name for it."""
    if trainer is not None and like.report.system == trainer.name:
        try:
            first = keys_of(trainer, source_of(planned, before))
            second = keys_of(trainer, source_of(planned, after))
        except ConfigError:  # what one of them cannot say has no key there
            pass
        else:
            return _changed(first, second)
    key_names = {to: entry.key for entry in like.report.entries for to in entry.to}
    first, second = before.model_dump(), after.model_dump()
    names = {key: key_names.get(f"layout.{key}", f"layout.{key}") for key in first}
    return _changed(
        {names[key]: value for key, value in first.items()},
        {names[key]: value for key, value in second.items()},
    )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: {_word(before.get(key))} -> {_word(after.get(key))}"
        for key in (*before, *(key for key in after if key not in before))
        if before.get(key) != after.get(key)
    ]


def _word(value: Any) -> str:
    if value is None:
        return "(left out)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def print_like(like: Like) -> None:
    """Print a summary of what the keys of another trainer's config mean for the plan."""
    report = like.report
    if not report.entries:  # of a model that is planned from its shapes
        return
    say(summary(report))
    planned = [entry for entry in report.entries if any(_is_target(key) for key in entry.to)]
    free = [entry for entry in report.entries if not entry.to and entry.verdict == "ignored"]
    say(
        f"{len(planned)} keys give model, layout, batch or cluster; {len(free)} have no effect on "
        "layout and memory"
    )
    origin = like.config.origins.get("layout.microbatch", "default")
    if like.layout is not None and (origin == "default" or origin.startswith("derived")):
        micro = like.layout.microbatch
        say(f"note: the file says no microbatch: layout.microbatch = {micro} is assumed")
    for entry in report.entries:
        if entry.verdict == "unsupported" and _is_planned(entry):
            say(f"note: not planned: {entry.key} = {_word(entry.value)}: {entry.note}")


def _is_target(key: str) -> bool:
    return key.partition(".")[0] in _PLANNED or key in _PLANNED_KEYS


def print_compared(comparison: LikeComparison) -> None:
    """Print whether another trainer's layout fits, where it does not, and what is faster."""
    prediction = comparison.theirs
    time = format_seconds(prediction.time.total)
    label = prediction.layout.label
    if not comparison.over:
        memory = prediction.memory
        say(
            f"as given: {label} fits, {format_bytes(memory.total)} of {format_bytes(memory.limit)} "
            f"on pipeline rank {memory.rank}; {time} a step, MFU {prediction.mfu:.1%}"
        )
    for memory in comparison.over:
        parts = sorted(memory.by_category().items(), key=lambda part: -part[1])[:3]
        largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
        say(
            f"as given: {label} does not fit on pipeline rank {memory.rank}: "
            f"{format_bytes(memory.total)} of {format_bytes(memory.limit)}; most of it {largest}"
        )
    if comparison.faster is None:
        say("nothing is faster by more than 2%" if not comparison.over else "nothing else fits")
        return
    share = prediction.time.total / comparison.faster.time.total
    verb = "fits" if comparison.over else "is faster"
    say(
        f"what {verb}: {comparison.faster.layout.label}, "
        f"{format_seconds(comparison.faster.time.total)} a step"
        + ("" if comparison.over else f", {share:.2f} x the speed")
    )
    for change in comparison.changes:
        say(change, "  ")


def compared_json(like: Like, comparison: LikeComparison) -> dict[str, Any]:
    """Return a comparison as JSON values."""
    return {
        "file": like.report.as_json(),
        "as_given": prediction_json(comparison.theirs),
        "over": [{"rank": memory.rank, "bytes": round(memory.total)} for memory in comparison.over],
        "faster": None if comparison.faster is None else prediction_json(comparison.faster),
        "changes": comparison.changes,
    }


def free_config(like: Like) -> Config:
    """Return the file's config with all layout keys left to the planner."""
    return freed(like.config)
