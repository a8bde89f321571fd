"""`--measured`: corrects predictions for a cluster by measurements made on it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshwright.cli.common import read_rows, say
from meshwright.cost.calibration import Calibration, calibration_named
from meshwright.cost.inputs import CostInputs
from meshwright.cost.measured import Correction, Measurement, correct, corrected, kind_of
from meshwright.cost.row_experts import RowError
from meshwright.cost.rows import read_row
from meshwright.errors import ConfigError
from meshwright.interop.logs import LoggedRun, is_log, read_log
from meshwright.kernels.processor import processor
from meshwright.layout import Layout
from meshwright.planner.plan import check_legal, cost_inputs_of, on_cluster
from meshwright.runtime.pricing.correction import (
    applied,
    keep_correction,
    measurement_of,
    uncorrected,
)
from meshwright.spec.loading import Config
from meshwright.units import GIB, parse_bytes, parse_seconds

_TYPED: Final = ("layout", "step", "memory", "log")

_FILES: Final = (".json", ".jsonl", ".log", ".csv", ".txt")


class Corrected(NamedTuple):
    """A calibration corrected by measurements, its corrections, and the file that stores them."""

    calibration: Calibration
    corrections: tuple[Correction, ...]
    file: Path | None = None

    @property
    def document(self) -> list[dict[str, Any]]:
        """The corrections as JSON values."""
        return [
            {
                "of": correction.kind,
                "compute": correction.compute,
                "links": correction.links,
                "memory": correction.memory,
                "says": list(correction.text),
                "kept": None if self.file is None else str(self.file),
            }
            for correction in self.corrections
        ]

    def print(self) -> None:
        """Print the corrections, and where they are stored."""
        for correction in self.corrections:
            for text in correction.text:
                say(f"measured: {text}")
        if self.file is not None:
            say(f"kept for this cluster: {self.file}; --no-keep leaves it out, deleting it forgets")


def add_measured(parser: argparse.ArgumentParser, metavar: str, *, keeps: bool = True) -> None:
    """Add the option `--measured` to a parser and, with `keeps`, `--no-keep`."""
    parser.add_argument("--measured", action="append", nargs="+", default=[], metavar=metavar)
    if keeps:
        parser.add_argument(
            "--no-keep", action="store_true", help="correct by --measured this time only"
        )


def take_measured(args: argparse.Namespace) -> list[str]:
    """Return the measurements in `--measured`; words that belong to none are config arguments.

    Those are moved to `args.words`. A measurement such as `layout=tp8 mb1 step=13.9s` may be given
    with or without quotes.
    """
    measurements: list[str] = []
    for group in args.measured:
        typed = False  # a layout is being said, whose label has several words
        for index, word in enumerate(group):
            key, has_value, _ = word.partition("=")
            if has_value and key in _TYPED:
                if key == "layout" or index == 0:
                    measurements.append(word)
                else:
                    measurements[-1] += f" {word}"
                typed = key == "layout" and " " not in word
            elif index == 0 or (not has_value and Path(word).suffix in _FILES):
                measurements.append(word)
            elif typed and not has_value and not Path(word).exists():
                measurements[-1] += f" {word}"
            else:
                args.words.append(word)
                typed = False
    return measurements


def measured_for(
    named: list[str],
    config: Config,
    calibration: Calibration | None,
    environ: Mapping[str, str],
    *,
    keeps: bool,
    system: str = "meshwright",
    layout: Layout | None = None,
) -> Corrected | None:
    """Return a calibration corrected by measured runs on a cluster like the config's.

    `named` are the values of `--measured`: runs of Meshwright, files of measurements, or logs of
    another trainer, whose layout is `layout`, since logs do not say it. `calibration` is the one to
    correct, by default that of the config. `system` is the trainer that was measured, a name of
    `SYSTEMS`. With `keeps`, the correction of a default calibration is stored for later plans, in
    the cache folder that `environ` gives. Returns None if `named` is empty. Raises `ConfigError`
    for measurements that are unreadable, or of another device or system.
    """
    if not named:
        return None
    is_named = calibration is not None
    base = calibration or calibration_named(config.cluster.calibration)
    base = uncorrected(base)
    setting = cost_inputs_of(config, base, processor=processor(), system=system)
    measurements: list[Measurement] = []
    for text in named:
        for measurement in _read(text, setting, base, layout):
            if kind_of(measurement.setting) != kind_of(setting):
                raise ConfigError(
                    f"--measured {text}: {measurement.name or 'it'} is of "
                    f"{kind_of(measurement.setting)}, but the plan is for {kind_of(setting)}"
                )
            measurements.append(measurement)
    correction = correct(measurements)
    path = None
    if keeps and not is_named:
        path = keep_correction(correction, config, environ, "plan --measured")
    return Corrected(applied(base, [correction]), (correction,), path)


def measured_rows(named: list[str], calibration: Calibration) -> Corrected | None:
    """Return a calibration corrected by files of measurements and by runs.

    There is a correction for each system and device. None if `named` is empty.
    """
    if not named:
        return None
    base = uncorrected(calibration)
    corrections = corrected(
        (measurement for text in named for measurement in _read(text, None, base, None)), base
    )
    return Corrected(applied(base, corrections), tuple(corrections))


def _read(
    text: str, setting: CostInputs | None, base: Calibration, layout: Layout | None
) -> Iterator[Measurement]:
    """Yield the measurements that an argument names: a run, a file of rows, a log, typed values."""
    if text.partition("=")[0] in _TYPED:
        if setting is None:
            raise ConfigError(f"--measured {text}: a layout needs a model; name rows, or a run")
        yield _typed(text, setting)
    elif Path(text).is_dir():
        yield measurement_of(Path(text), base)
    elif Path(text).is_file() and is_log(Path(text)):
        if setting is None or layout is None:
            raise ConfigError(
                f"--measured {text}: a log needs the layout that it was of: "
                f"'layout=shard8 zero3 mb1 log={text}'"
            )
        yield _of_log(Path(text), setting, layout)
    elif Path(text).is_file():
        yield from _of_rows(Path(text), base)
    else:
        raise ConfigError(
            f"--measured {text}: neither a run folder, nor a file of rows, nor a log, nor "
            "'layout=shard8 zero3 mb1 step=13.9s memory=61GiB'"
        )


def _typed(text: str, setting: CostInputs) -> Measurement:
    values = {
        match[1]: match[2].strip()
        for match in re.finditer(r"(\w+)=(.*?)(?=\s+\w+=|$)", text.replace(",", " "))
    }
    if "layout" not in values or not values.keys() & {"step", "memory", "log"}:
        raise ConfigError(f"--measured {text}: it needs a layout, and step, memory or a log")
    layout = Layout.parse(values["layout"])
    check_legal(setting, layout)
    if "log" in values:
        return _of_log(Path(values["log"]), setting, layout)
    try:
        seconds = parse_seconds(values["step"]) if "step" in values else None
        peak_bytes = float(parse_bytes(values["memory"])) if "memory" in values else None
    except ValueError as error:
        raise ConfigError(f"--measured {text}: {error}") from None
    return Measurement(on_cluster(setting, layout), layout, seconds, peak_bytes, name=text)


def _of_log(path: Path, setting: CostInputs, layout: Layout) -> Measurement:
    """Return the measurement in a log of another trainer, and print the lines that it is from."""
    train = setting.train
    log = read_log(path, LoggedRun(train.batch, train.seq_len, layout.world, layout.model_ranks))
    for line in log.says:
        say(f"measured: {line}", out=sys.stderr)
    return Measurement(
        on_cluster(setting, layout),
        layout,
        log.seconds,
        log.bytes,
        is_allocated=log.is_allocated,
        name=str(path),
    )


def _of_rows(path: Path, base: Calibration) -> Iterator[Measurement]:
    rows = [row for row in read_rows(path, "--measured") if row.get("status", "ok") == "ok"]
    rows = [row for row in rows if row.get("step_time_s") or row.get("peak_mem_gib")]
    if not rows:
        raise ConfigError(f"--measured {path}: no row says step_time_s or peak_mem_gib")
    for row in rows:
        try:
            case = read_row(row, base)
            seconds, gib = row.get("step_time_s"), row.get("peak_mem_gib")
            yield Measurement(
                case.setting,
                case.layout,
                float(seconds) if seconds else None,
                float(gib) * GIB if gib else None,
                is_allocated="allocated" in str(row.get("mem_kind")),
                name=f"row {row.get('id')}",
            )
        except (RowError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"--measured {path}: row {row.get('id')}: {error}") from None
