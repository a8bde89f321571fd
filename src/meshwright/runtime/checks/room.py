"""What the steps of a run take of a disk, and whether it has that."""

from __future__ import annotations

import shutil
from pathlib import Path

from meshwright.errors import ConfigError, refusal
from meshwright.program.optimizer import saved_bytes
from meshwright.spec.loading import Config
from meshwright.units import format_bytes


def check_room(config: Config, root: Path, *, for_all: bool = False) -> str:
    """Return what the steps of a run take of the disk of `root`, and what is free there.

    Raises `ConfigError` if a single step does not fit, and `for_all` if all that are kept don't.
    """
    step = saved_bytes(config.model, config.optimizer)
    # The newest is there before the oldest goes.
    count = config.checkpoint.keep + config.checkpoint.keep_best + 1
    free = shutil.disk_usage(nearest_folder(root)).free
    text = (
        f"{count} steps of {format_bytes(step)} need {format_bytes(step * count)}; "
        f"{format_bytes(free)} are free"
    )
    if free < (step * count if for_all else step):
        hint = "checkpoint.dir or log.dir sets where"
        raise ConfigError(refusal(f"{root} has no room for the run's steps: {text}", hint=hint))
    return text


def nearest_folder(path: Path) -> Path:
    """Return the nearest folder on a path that is there."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
