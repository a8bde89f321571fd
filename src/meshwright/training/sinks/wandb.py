"""Weights & Biases: one run of a project, continued when the run is resumed."""

from __future__ import annotations

import importlib

from meshwright.training.sinks.base import Opened, TrackedRun


def open_tracker(run: TrackedRun) -> Opened:
    """Open or continue the W&B run whose id is the run's identity.

    W&B ignores numbers of steps that it has already, so steps that are trained again after a resume
    keep their first numbers, which are the same on the same layout.
    """
    wandb = importlib.import_module("wandb")
    tracked = wandb.init(
        project=run.setting,
        name=run.name,
        id=run.identity,
        resume="allow",
        dir=str(run.folder),
        config=dict(run.config),
    )
    return Opened(lambda numbers, step: tracked.log(dict(numbers), step=step), tracked.finish)
