"""Stored calibrations (measured device constants), and configs that use them for predictions."""

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
    """A stored calibration and its file."""

    path: Path
    calibration: Calibration


def user_cache(environ: Mapping[str, str]) -> Path:
    """Return Meshwright's folder in the user's cache folder, by the XDG Base Directory rules."""
    home = Path(environ.get("HOME", "~")).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "meshwright"


def kept_at(machine: Machine, environ: Mapping[str, str], precision: str = "") -> Path:
    """Return the file for this machine's calibration, named by its processor or GPU and torch.

    With a `precision`, it is the file of the quick measurement that `train` or `plan` makes for
    this precision; without, that of `bench device`. Raises `ConfigError` without torch, whose
    version is in the name.
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
    """Write a calibration's text to a file; returns False if that is impossible."""
    # Only here: data's room brings numpy, which a config has no use for.
    from meshwright.files import write_atomic

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    except (OSError, DataError):
        return False
    return True


def as_measured_here(config: Config, environ: Mapping[str, str]) -> Config:
    """Return a config that uses a stored calibration, unless it names one or none is stored.

    The origin of its `cluster.calibration` has the date and the source of the measurement.
    """
    left = left_open(config, environ)
    stored = _kept_for(config, environ) if left is None else find_kept(left, environ)
    return config if stored is None else priced_by(config, stored)


def kept_of_cluster(config: Config, environ: Mapping[str, str]) -> Path | None:
    """Return the file for corrections of predictions for the config's cluster preset.

    None for `cluster.preset = local`, which is measured itself, and if the config or the
    environment names a calibration.
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
    """Return the stored correction for the config's cluster preset, or None."""
    path = kept_of_cluster(config, environ)
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if path is not None:
            return Kept(path, parse_calibration(read_text(path)))
    return None


def left_open(config: Config, environ: Mapping[str, str]) -> Config | None:
    """Return the config, without a calibration of this machine, if this machine may price it.

    None if it names a calibration or another cluster, or if the environment selects the shipped
    constants.
    """
    cluster = config.cluster
    if config.origins.get(CALIBRATION, "").startswith(MEASURED_HERE):
        cluster = cluster.model_copy(update={"calibration": None})
    is_named = cluster.preset != "local" or cluster.calibration is not None
    if is_named or environ.get(VARIABLE) == SHIPPED:
        return None
    return config.model_copy(update={"cluster": cluster})


def machine_of(config: Config, environ: Mapping[str, str]) -> Machine:
    """Return this machine with its default number of ranks, ignoring the config's."""
    return detect(config.cluster.model_copy(update={"devices_per_node": None}), environ)


def find_kept(config: Config, environ: Mapping[str, str]) -> Kept | None:
    """Return this machine's stored calibration: by `bench device`, else the quick one, or None."""
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
    """Return a config that uses a stored calibration, with the origin of the setting recorded."""
    about = stored.calibration
    cluster = config.cluster.model_copy(update={"calibration": str(stored.path)})
    origins = {**config.origins, CALIBRATION: f"{MEASURED_HERE}, {about.date}: {about.source}"}
    return config.model_copy(update={"cluster": cluster, "origins": origins})


def source_of(machine: Machine, measured: Mapping[str, Any], how: str) -> str:
    """Return a line on the source of measured constants: how, machine, ranks and torch version."""
    name = measured["machine"] if machine.device == "cuda" else machine.name
    ranks = "1 rank" if measured["ranks"] == 1 else f"{measured['ranks']} ranks"
    return f"{how}: {name}, {ranks}, torch {measured['torch']}"


def calibration_in_use(
    config: Config, environ: Mapping[str, str], today: datetime.date | None = None
) -> Finding:
    """Return a finding on the calibration that a config's predictions use, and its age."""
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
    """Return how many days ago an ISO date was, in words; "" if it is not a date."""
    try:
        days = (today - datetime.date.fromisoformat(date)).days
    except ValueError:
        return ""
    return {0: ", today", 1: ", yesterday"}.get(days, f", {days} days ago")
