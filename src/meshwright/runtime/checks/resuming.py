"""Resuming a run from its newest step: whether the step is its own, and which steps are valid."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from meshwright.checkpoint.commit import anew, read_manifest, steps
from meshwright.checkpoint.identity import check_parts, identity_of, refuse_changed
from meshwright.data import Dataset, StreamedDataset
from meshwright.errors import CheckpointError, ConfigError
from meshwright.program.events import Events, ending
from meshwright.spec.loading import KEYS, Config, load_config
from meshwright.spec.model import OF_PADDING
from meshwright.spec.parts import parts
from meshwright.training.run_folder import Job, RunFolder, read_job, resumed_folder


class Resume(NamedTuple):
    """A run to resume, and the parts of its identity that may have changed."""

    run: Path
    allowed: tuple[str, ...] = ()


def resumed_folder_with_steps(config: Config, resume: Resume) -> RunFolder:
    """Return the folder of a run to resume; raises `ConfigError` if it is none or has no step."""
    folder = resumed_folder(resume.run)
    where = folder.steps_of(config)
    if not steps(where):
        raise ConfigError(f"--resume {resume.run}: {where} holds no committed step")
    return folder


def resumed(job: Job, dataset: Dataset | StreamedDataset, resume: Resume) -> Job:
    """Return the job of a resumed run; refuses a step that another run has written."""
    check_parts(resume.allowed)
    for step in reversed(steps(job.checkpoints)):
        # A step that is corrupt is the ranks' to set aside: one before it is looked at here.
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
    """Refuse a model whose weights have other names or shapes than the run's, whatever is allowed.

    `changes` says how the models differ.
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
    """Yield the keys of the model and its adapters that differ from the run's, with both values."""
    for section in ("model", "lora"):
        old, new = (getattr(config, section).model_dump() for config in (before, current))
        for key in KEYS[section]:
            if key != OF_PADDING and old[key] != new[key]:
                yield f"{section}.{key} was {old[key]}, is {new[key]}"


def _has_ended(folder: RunFolder) -> bool:
    """Whether a run's events say that it ended, or was stopped on request after its last step."""
    last = ending(Events.read(folder.events)) if folder.events.is_file() else None
    return last is not None and last["event"] == "end"
