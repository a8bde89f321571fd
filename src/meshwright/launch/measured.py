"""The calibration of this machine that `bench device` keeps, and configs that are priced by it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from meshwright.errors import ConfigError, DataError
from meshwright.launch.machine import detect, gpu_name
from meshwright.layout import Machine
from meshwright.predict.calibration import parse_calibration
from meshwright.spec.dump import MEASURED_HERE
from meshwright.spec.loading import Config

_KEY: Final = "cluster.calibration"
# The number goes up where the constants' meaning changes: what was kept before is not read.
_FOLDER: Final = "calibrations-2"


def user_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder under the user's cache folder: the XDG Base Directory Specification."""
    home = Path(environ.get("HOME", "~")).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "meshwright"


def kept_at(machine: Machine, environ: Mapping[str, str]) -> Path:
    """Return the file for what is measured here: by processor, cores or GPU, and torch."""
    name = (gpu_name() if machine.device == "cuda" else None) or machine.name
    words = f"{name} torch {version('torch')}"
    return user_cache(environ) / _FOLDER / f"{re.sub('[^A-Za-z0-9.+]+', '-', words)}.toml"


def keep(text: str, config: Config, machine: Machine, environ: Mapping[str, str]) -> Path | None:
    """Keep a calibration of this machine; None where it is of other than the default ranks.

    None, too, where the folder can't be written.
    """
    if config.cluster.devices_per_node is not None:
        return None
    # Only here: data's room brings numpy, which a config has no use for.
    from meshwright.data.files import write_atomic

    try:
        path = kept_at(machine, environ)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    except (OSError, RuntimeError, DataError):  # no home at all, too
        return None
    return path


def as_measured_here(config: Config, environ: Mapping[str, str]) -> Config:
    """Return a config that is priced by what was measured here, where it names nothing else.

    Its `cluster.calibration` has the date and the source of the measurement as its origin.
    """
    cluster = config.cluster
    if cluster.preset != "local" or cluster.calibration is not None:
        return config
    try:
        if not (user_cache(environ) / _FOLDER).is_dir():
            return config
        path = kept_at(detect(cluster, environ), environ)
        about = parse_calibration(path.read_text(encoding="utf-8"))
    except (ConfigError, OSError, RuntimeError, ValueError):  # nothing that can be read
        return config
    origin = f"{MEASURED_HERE}, {about.date}: {about.source}"
    changed = cluster.model_copy(update={"calibration": str(path)})
    origins = {**config.origins, _KEY: origin}
    return config.model_copy(update={"cluster": changed, "origins": origins})
