"""Stored calibrations of this machine, and configs that are priced by them."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshwright.cost.calibration import SHIPPED, Calibration, parse_calibration
from meshwright.errors import ConfigError, DataError, lacks_training
from meshwright.files import read_text
from meshwright.kernels.processor import fingerprint
from meshwright.layout import Machine
from meshwright.runtime.machines.machine import detect, gpu_name
from meshwright.runtime.machines.system import Finding
from meshwright.spec.dump import MEASURED_HERE
from meshwright.spec.loading import Config

CALIBRATION: Final = "cluster.calibration"
# Set to "shipped", nothing is measured without being asked for, and nothing that is kept is read.
VARIABLE: Final = "MESHWRIGHT_CALIBRATION"
# What decides where calibrations are kept, and whether they are read.
VARIABLES: Final = (VARIABLE, "HOME", "XDG_CACHE_HOME")
# The number goes up where the constants' meaning changes: what was kept before is not read.
_FOLDER: Final = "calibrations-4"
_CLUSTERS: Final = "clusters-1"


class Kept(NamedTuple):
    """A stored calibration of this machine and its file."""

    path: Path
    calibration: Calibration


def user_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder in the user's cache folder: the XDG Base Directory Specification."""
    home = Path(environ.get("HOME", "~")).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "meshwright"


def kept_at(machine: Machine, environ: Mapping[str, str], precision: str = "") -> Path:
    """Return the file for measurements here: by processor, cores or GPU, and torch.

    With a `precision`, the file of what a start measures for it. Raises `ConfigError` without
    torch, whose version is a part of what is measured.
    """
    if machine.device == "cuda":
        name = gpu_name() or machine.name
    else:
        name = f"{machine.name} {fingerprint()}"
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        raise lacks_training("a measurement of this machine") from None
    stem = re.sub("[^A-Za-z0-9.+]+", "-", f"{name} torch {torch_version}")
    return user_cache(environ) / _FOLDER / f"{stem}{'.' if precision else ''}{precision}.toml"


def keep(text: str, path: Path) -> bool:
    """Store a calibration; False if the folder can't be written."""
    # Only here: data's room brings numpy, which a config has no use for.
    from meshwright.files import write_atomic

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    except (OSError, DataError):
        return False
    return True


def as_measured_here(config: Config, environ: Mapping[str, str]) -> Config:
    """Return a config priced by this machine's measurements, if it names nothing else.

    The origin of its `cluster.calibration` has the date and the source of the measurement.
    """
    left = left_open(config, environ)
    stored = _kept_for(config, environ) if left is None else find_kept(left, environ)
    return config if stored is None else priced_by(config, stored)


def kept_of_cluster(config: Config, environ: Mapping[str, str]) -> Path | None:
    """Return the file of `--measured` for a config's cluster of the catalogue.

    None for this machine, which measures itself, and if the config names a calibration.
    """
    cluster = config.cluster
    origin = config.origins.get(CALIBRATION, "")
    is_named = cluster.calibration is not None and not origin.startswith(MEASURED_HERE)
    if cluster.preset == "local" or is_named or environ.get(VARIABLE) == SHIPPED:
        return None
    links = "-".join([] if cluster.links is None else list(cluster.links))
    stem = re.sub("[^A-Za-z0-9.+]+", "-", f"{cluster.preset} {links}".strip())
    return user_cache(environ) / _CLUSTERS / f"{stem}.toml"


def _kept_for(config: Config, environ: Mapping[str, str]) -> Kept | None:
    """Return the stored calibration of a config's cluster of the catalogue, if there is one."""
    path = kept_of_cluster(config, environ)
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if path is not None:
            return Kept(path, parse_calibration(read_text(path)))
    return None


def left_open(config: Config, environ: Mapping[str, str]) -> Config | None:
    """Return a config as given, if its pricing is left to this machine.

    None if it names a calibration or another cluster, or if the environment selects the shipped
    one.
    """
    cluster = config.cluster
    if config.origins.get(CALIBRATION, "").startswith(MEASURED_HERE):
        cluster = cluster.model_copy(update={"calibration": None})
    is_named = cluster.preset != "local" or cluster.calibration is not None
    if is_named or environ.get(VARIABLE) == SHIPPED:
        return None
    return config.model_copy(update={"cluster": cluster})


def machine_of(config: Config, environ: Mapping[str, str]) -> Machine:
    """Return this machine with its default number of ranks."""
    return detect(config.cluster.model_copy(update={"devices_per_node": None}), environ)


def find_kept(config: Config, environ: Mapping[str, str]) -> Kept | None:
    """Return the stored calibration of this machine: of `bench device`, else of a start."""
    with contextlib.suppress(ConfigError, OSError, RuntimeError):  # no home, nothing to look into
        if not (user_cache(environ) / _FOLDER).is_dir():
            return None
        machine = machine_of(config, environ)
        for precision in ("", config.train.precision):
            path = kept_at(machine, environ, precision)
            with contextlib.suppress(OSError, ValueError):  # nothing that can be read
                return Kept(path, parse_calibration(read_text(path)))
    return None


def priced_by(config: Config, stored: Kept) -> Config:
    """Return a config that is priced by a stored calibration."""
    about = stored.calibration
    cluster = config.cluster.model_copy(update={"calibration": str(stored.path)})
    origins = {**config.origins, CALIBRATION: f"{MEASURED_HERE}, {about.date}: {about.source}"}
    return config.model_copy(update={"cluster": cluster, "origins": origins})


def source_of(machine: Machine, measured: Mapping[str, Any], how: str) -> str:
    """Return the source of constants in words; a GPU has its driver's name."""
    name = measured["machine"] if machine.device == "cuda" else machine.name
    ranks = "1 rank" if measured["ranks"] == 1 else f"{measured['ranks']} ranks"
    return f"{how}: {name}, {ranks}, torch {measured['torch']}"


def calibration_in_use(
    config: Config, environ: Mapping[str, str], today: datetime.date | None = None
) -> Finding:
    """Return which calibration prices a config, and how old it is."""
    name, left = "calibration", left_open(config, environ)
    if left is None:
        named = config.cluster.calibration
        return Finding(name, "the shipped constants" if named in (None, SHIPPED) else str(named))
    stored = find_kept(left, environ)
    if stored is None:
        is_cpu = machine_of(left, environ).device == "cpu"
        advice = "; the first `train` or `plan` measures this CPU" if is_cpu else ""
        return Finding(name, f"the shipped constants{advice}")
    about = stored.calibration
    today = datetime.datetime.now(datetime.UTC).date() if today is None else today
    text = f"{about.source}{_age(about.date, today)}: {stored.path}"
    if about.is_quiet:
        return Finding(name, text)
    busy = f"{1 - about.had_core:.0%}"
    return Finding(name, f"{text}; other processes had {busy} of the cores meanwhile", "note")


def _age(date: str, today: datetime.date) -> str:
    """Return how long ago a date was, where it is one."""
    try:
        days = (today - datetime.date.fromisoformat(date)).days
    except ValueError:
        return ""
    return {0: ", today", 1: ", yesterday"}.get(days, f", {days} days ago")
