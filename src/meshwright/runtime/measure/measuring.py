"""The quick measurement of a CPU at its first `train` or `plan`, used for predictions."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from meshwright.cost.calibration import SHIPPED, as_toml, blocks_of, parse_calibration
from meshwright.errors import ConfigError, RankFailed
from meshwright.layout import Machine, resolve_layout
from meshwright.lines import fitted
from meshwright.prove.case import Case
from meshwright.runtime.machines.machine import torch_build
from meshwright.runtime.pricing.measured import (
    CALIBRATION,
    Kept,
    find_kept,
    keep,
    kept_at,
    left_open,
    machine_of,
    priced_by,
    source_of,
)
from meshwright.spec.loading import Config
from meshwright.spec.words import busy
from meshwright.units import format_seconds

_WITHOUT: Final = f"predictions are by the shipped constants, as with {CALIBRATION}={SHIPPED}"
# Has so many ranks of so many threads measure a case in seconds: what `bench.calibrate` returns.
Measure = Callable[[str, int, int, Mapping[str, str]], Mapping[str, Any]]


def measured_first(
    config: Config,
    environ: Mapping[str, str],
    say: Callable[[str], None] | None = None,
    measure: Measure | None = None,
) -> Config:
    """Return a config that uses this machine's calibration, measuring the machine if needed.

    Only CPUs are measured, and again if other processes used their cores during the last
    measurement and no longer do. `say` receives a line before and after it, by default printed to
    stderr. If measuring fails or cannot be stored, the shipped constants apply. Raises
    `StoppedOnRequest` on SIGINT or SIGTERM.
    """
    left = left_open(config, environ)
    if left is None:
        return config
    stored = find_kept(left, environ)
    if stored is None or (not stored.calibration.is_quiet and _is_quiet(left, environ)):
        stored = _measured(left, environ, say or _to_stderr, measure or _on_ranks) or stored
    return config if stored is None else priced_by(config, stored)


def _measured(
    config: Config, environ: Mapping[str, str], say: Callable[[str], None], measure: Measure
) -> Kept | None:
    """Measure this machine and store the calibration; None if that is impossible."""
    machine = machine_of(config, environ)
    if machine.device != "cpu":
        return None
    try:
        case = _case(config, machine)
    except ConfigError:  # which the command itself refuses
        return None
    if torch_build() is None:
        say(f"note: this CPU is not measured, which needs PyTorch: {_WITHOUT}")
        return None
    path = _place(machine, environ, config.train.precision)
    if path is None:
        say(f"note: this CPU is not measured, there is no folder to keep it in: {_WITHOUT}")
        return None
    say(f"note: measuring this CPU for predictions, some seconds; {CALIBRATION}={SHIPPED} skips it")
    began = time.monotonic()
    try:
        measurement = measure(case, machine.devices, machine.threads(machine.devices), environ)
    except (ConfigError, RankFailed) as error:
        say(f"note: this CPU could not be measured: {_WITHOUT}: {error}")
        return None
    took, date = time.monotonic() - began, datetime.datetime.now(datetime.UTC).date()
    source = source_of(machine, measurement, f"a start's measurement in {format_seconds(took)}")
    blocks = blocks_of(config.model, config.train.seq_len)
    text = as_toml(
        {"cpu": measurement["constants"]}, date.isoformat(), source, blocks, measurement["had_core"]
    )
    if not keep(text, path):
        say(f"note: {path} cannot be written: {_WITHOUT}")
        return None
    stored = Kept(path, parse_calibration(text))
    say(f"note: {_told(stored, took)}")
    return stored


def _is_quiet(config: Config, environ: Mapping[str, str]) -> bool:
    """Return whether the machine is idle enough for a better measurement now."""
    machine = machine_of(config, environ)
    return busy(machine.load, machine.cores) is None


def _place(machine: Machine, environ: Mapping[str, str], precision: str) -> Path | None:
    """Return the file in which to store a measurement; None if its folder is not writable."""
    try:
        path = kept_at(machine, environ, precision)
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home at all, too
        return None
    return path if os.access(path.parent, os.W_OK) else None


def _told(stored: Kept, took: float) -> str:
    """Return a line on where and how long a CPU was measured, and whether it was disturbed."""
    text = f"this CPU was measured in {format_seconds(took)}: {stored.path}"
    if stored.calibration.is_quiet:
        return text
    other_share = f"{1 - stored.calibration.had_core:.0%}"
    return (
        f"{text}. Other processes used {other_share} of its cores, so predictions of messages "
        "use the shipped constants, and the next start on a quiet machine measures again"
    )


def _case(config: Config, machine: Machine) -> str:
    """Return, as JSON, the model and layout to measure; raises `ConfigError` if not legal."""
    return Case(config.model, config.train, resolve_layout(config, machine)).as_json()


def _on_ranks(case: str, ranks: int, threads: int, environ: Mapping[str, str]) -> Mapping[str, Any]:
    """Measure a device on local ranks within seconds, and return the result."""
    # Only here, and only once: most starts need neither the ranks nor their folder for this.
    from meshwright.runtime.measure.benchmark import measure_on_ranks

    results: list[dict[str, Any]] = []
    request = {"what": "device", "budget_s": None, "case": case, "device": "cpu", "compiles": False}
    measure_on_ranks(request, ranks, environ, results.append, threads=threads)
    return results[0]


def _to_stderr(text: str) -> None:
    print(fitted(text, sys.stderr), file=sys.stderr, flush=True)
