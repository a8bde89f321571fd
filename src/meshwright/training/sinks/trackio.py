"""Trackio: one run of a project, continued when the run is resumed."""

from __future__ import annotations

import importlib

from meshwright.training.sinks.base import Opened, TrackedRun


def open_tracker(run: TrackedRun) -> Opened:
    """Open or continue the Trackio run, whose name contains the identity, since Trackio has
    no ids.
    """
    trackio = importlib.import_module("trackio")
    trackio.init(
        project=run.setting,
        name=f"{run.name}-{run.identity[:6]}",
        resume="allow",
        config=dict(run.config),
    )
    return Opened(lambda numbers, step: trackio.log(dict(numbers), step=step), trackio.finish)
