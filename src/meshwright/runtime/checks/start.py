"""Checks that raise before any rank starts, and whether a run may resume from its newest step."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import resource
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from meshwright.checkpoint.commit import anew, read_manifest, steps
from meshwright.checkpoint.identity import check_parts, identity_of, refuse_changed
from meshwright.data import Dataset, StreamedDataset
from meshwright.data.dataset import is_prepared
from meshwright.errors import CheckpointError, ConfigError, refusal
from meshwright.layout import Layout, Machine
from meshwright.program.events import Events, ending
from meshwright.runtime.machines.machine import (
    check_build,
    check_torch,
    find_gpus,
    gpu_name,
    memory_of_machine,
    torch_build,
)
from meshwright.runtime.pricing.planned import cost_inputs_on
from meshwright.spec.loading import KEYS, Config, load_config
from meshwright.spec.model import OF_PADDING
from meshwright.spec.parts import parts
from meshwright.training.events import without_package
from meshwright.training.run_folder import Job, RunFolder, read_job, resumed_folder
from meshwright.training.sinks import trackers_of
from meshwright.units import MIB, format_bytes

# What ranks hold between steps.
_STATES: Final = ("weights", "gradients", "optimizer")
# What a CPU rank needs besides tensors: measured were 4 to 20 MiB, by the layout. With less no
# thread can start, and the C library ends the process without a word of Python's.
_OWN: Final = 24 * MIB

# Files that one rank has open, and those that each connection to another rank adds. A rank alone
# trains with 32, two ranks each with 48, four with 64 (torch 2.13, gloo).
_FILES: Final = 32
_FILES_OF_A_PEER: Final = 8
_USUAL_FILES: Final = 1024  # Linux's default


def check_extras(config: Config) -> None:
    """Raise `ConfigError` if the package of an experiment tracker is not installed."""
    for name in trackers_of(config.log):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(without_package(name))


def check_device(config: Config, machine: Machine, environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` if torch does not support the GPUs, or for another device's preset.

    The latter is a `cluster.preset` of the catalogue that is not this machine's device.
    """
    check_torch("training")
    check_build(machine.device, find_gpus(environ), torch_build())
    preset = config.cluster.preset
    if preset == "local":
        return
    # Only here: `train --help` starts without the catalogue.
    from meshwright.cost.catalogue import device_named, find_device

    name = gpu_name() if machine.device == "cuda" else None
    known = None if name is None else device_named(name)
    if machine.device == "cpu":
        is_other = find_device(preset).kind != "cpu"
    else:
        is_other = known is not None and known.name != preset
    if is_other:
        rule = f"cluster.preset = {preset!r}, but this machine has {name or machine.name}"
        hint = "A preset is what a run is planned for. cluster.preset=local runs it on this machine"
        raise ConfigError(refusal(rule, hint=hint))


def check_tokenizer(config: Config) -> None:
    """Raise `ConfigError` if `model.init_from` is set but no tokenizer is known for it."""
    init_from, data = config.model.init_from, config.data
    if init_from is None or config.origins.get("data.tokenizer") != "default":
        return
    if all(is_prepared(source) for source in data.sources):  # which bring their own
        return
    raise ConfigError(
        f"model.init_from = {init_from!r} does not say which tokenizer it was trained with: give "
        "data.tokenizer"
    )


def open_files(layout: Layout) -> int:
    """Return about how many files and connections a rank of a layout has open.

    A rank has a connection to each rank of each of its process groups, including that of all ranks.
    """
    axes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    peers = sum(size - 1 for size in (layout.world, *axes))
    return _FILES + _FILES_OF_A_PEER * peers


def allow_open_files(layout: Layout) -> None:
    """Raise this process's limit of open files, which ranks inherit, to what the layout needs.

    Raises `ConfigError` if the system's hard limit is lower.
    """
    needed = open_files(layout)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        rule = f"the layout {layout.label} needs about {needed} open files and connections a rank"
        raise ConfigError(refusal(f"{rule}, but the limit is {hard}", hint=f"ulimit -n {needed}"))
    wanted = max(2 * needed, _USUAL_FILES)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def check_limit(config: Config, layout: Layout, machine: Machine) -> None:
    """Raise `ConfigError` if `cluster.memory` on a CPU is too small for any step of the layout.

    Counts weights, gradients, optimizer states and the memory of threads. Whether the activations
    fit shows only in a step.
    """
    limit = config.cluster.memory
    if limit is None or machine.device != "cpu":
        return
    # Not above: `train --help` starts without it.
    from meshwright.cost.price import memory

    setting = cost_inputs_on(config, machine, layout)
    states = max(
        sum(
            term.bytes
            for term in memory(setting, layout, pp_rank).terms
            if term.category in _STATES
        )
        for pp_rank in range(layout.pp)
    )
    needed = states + _OWN
    if limit < needed:
        rule = (
            f"cluster.memory = {format_bytes(limit)} is less than a rank needs: "
            f"{format_bytes(states)} for its weights, gradients and optimizer states, and "
            f"{format_bytes(_OWN)} for its threads and messages"
        )
        raise ConfigError(refusal(rule, legal=[f"cluster.memory={math.ceil(needed / MIB)}MiB"]))


def check_memory(config: Config, layout: Layout, machine: Machine) -> str:
    """Return a line on predicted memory; raises `ConfigError` if it exceeds what is available.

    Only tensors are counted, so the real use is higher.
    """
    try:
        setting = cost_inputs_on(config, machine, layout)
    except ConfigError as error:  # a device that the catalogue lacks
        return f"not known: {error}"
    from meshwright.cost.price import memory

    stages = [memory(setting, layout, pp_rank).allocated for pp_rank in range(layout.pp)]
    text = f"predicted {format_bytes(max(stages))} of tensors on the worst rank"
    if machine.device == "cuda":
        needed, available, limit_text = (
            max(stages),
            setting.cluster.device.memory,
            "a device has {}",
        )
    else:
        # Of all ranks that run here; each node runs as many.
        needed = sum(stages) * layout.world / layout.pp / config.cluster.nodes
        available, limit_text = memory_of_machine()[1], "{} are free"
        if layout.world > config.cluster.nodes:
            text += f", {format_bytes(needed)} on all ranks of this machine"
    if available and needed > available:
        hint = f"`meshwright plan --after-oom '{layout.label}'` lists what would fit"
        limit = limit_text.format(format_bytes(available))
        rule = f"the layout {layout.label} does not fit: {text}; {limit}"
        raise ConfigError(refusal(rule, hint=hint))
    return text


class Resume(NamedTuple):
    """A run to resume, and the `allowed` parts of its identity, such as "data", that may differ."""

    run: Path
    allowed: tuple[str, ...] = ()


def resumed_folder_with_steps(config: Config, resume: Resume) -> RunFolder:
    """Return the folder of a run to resume; raises `ConfigError` if it has no step to resume."""
    folder = resumed_folder(resume.run)
    where = folder.steps_of(config)
    if not steps(where):
        raise ConfigError(f"--resume {resume.run}: {where} holds no committed step")
    return folder


def resumed(job: Job, dataset: Dataset | StreamedDataset, resume: Resume) -> Job:
    """Return the job changed to resume its run from the newest readable step.

    Raises `ConfigError` or `CheckpointError` if no step is readable, if another run wrote it, if
    the model, the data or other parts of the identity differ and are not allowed to, or if all
    steps are done.
    """
    check_parts(resume.allowed)
    for step in reversed(steps(job.checkpoints)):
        # Ranks set corrupt steps aside; here, the newest readable one counts.
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(step)
            break
    else:
        problem = f"--resume {resume.run}: no step of {job.checkpoints} is readable"
        raise ConfigError(f"{problem}. {anew(job.checkpoints)}")
    identity = identity_of(job.config, dataset.identity)
    run = read_job(job.folder.path).run
    if "run" in resume.allowed:  # from here on it is the run that wrote the step
        run = str(manifest.get("run", ""))
    before = load_config(job.folder.config)
    changes = "; ".join(_changed_model(before, job.config))
    _check_shapes(before, job.config, changes)
    refuse_changed(manifest, identity, run, resume.allowed, {"model": changes})
    # A run that was killed after its last save has an evaluation and an end to come.
    is_left = manifest["step"] == job.config.train.steps and not _has_ended(job.folder)
    if manifest["step"] >= job.config.train.steps and not is_left:
        raise ConfigError(
            f"--resume {resume.run}: the run is at step {manifest['step']} of train.steps = "
            f"{job.config.train.steps}. To train longer, give a larger train.steps=N"
        )
    return replace(job, resume=True, allowed=resume.allowed, run=run)


def _check_shapes(before: Config, current: Config, changes: str) -> None:
    """Raise `CheckpointError` if weights of the model have other names or shapes than the run's.

    No option allows this. `changes` describes how the models differ, for the message.
    """
    old, new = (
        {part.name: part.real_shape for part in parts(config.model)} for config in (before, current)
    )
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            was, is_now = (list(shapes.get(name, ())) or "missing" for shapes in (old, new))
            problem = f"the run's weights do not fit this model: {changes}"
            raise CheckpointError(f"{problem} ({name} was {was}, is {is_now})")


def _changed_model(before: Config, current: Config) -> Iterator[str]:
    """Yield a line with both values for each key of the model or its adapters that has changed."""
    for section in ("model", "lora"):
        old, new = (getattr(config, section).model_dump() for config in (before, current))
        for key in KEYS[section]:
            if key != OF_PADDING and old[key] != new[key]:
                yield f"{section}.{key} was {old[key]}, is {new[key]}"


def _has_ended(folder: RunFolder) -> bool:
    """Return whether the run's last event is a normal end, including a stop on request."""
    last = ending(Events.read(folder.events)) if folder.events.is_file() else None
    return last is not None and last["event"] == "end"
