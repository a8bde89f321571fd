"""Experiment trackers for a run's numbers, by their key of `[log]`: one file each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from meshwright.spec.training import LogSpec
from meshwright.training.sinks import mlflow, tensorboard, trackio, wandb
from meshwright.training.sinks.base import Open, Opened

TRACKERS: Final[Mapping[str, Open]] = {
    "tensorboard": tensorboard.open_tracker,
    "wandb": wandb.open_tracker,
    "trackio": trackio.open_tracker,
    "mlflow": mlflow.open_tracker,
}


def trackers_of(log: LogSpec) -> Iterator[str]:
    """Yield the names of the trackers that a config enables; each names its package and its
    extra.
    """
    yield from (name for name in TRACKERS if getattr(log, name))


__all__ = ["TRACKERS", "Open", "Opened", "trackers_of"]
