"""Weights & Biases: one run of a project, continued when the run is resumed."""

from __future__ import annotations

import importlib

from meshwright.training.sinks.base import Opened, TrackedRun


def open_tracker(run: TrackedRun) -> Opened:
    """Open or continue the W&B run whose id is that of the run.

    W&B drops numbers of steps that it has already, so those of steps that are trained again, which
    are the same on the same layout, stay as they were.
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
