"""`--measured`: measurements of a cluster, which correct its predictions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshwright.cli.common import read_rows, say
from meshwright.cost.calibration import Calibration, calibration_named
from meshwright.cost.measured import Correction, Measurement, correct, corrected, kind_of
from meshwright.cost.row_experts import RowError
from meshwright.cost.rows import read_row
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.parallel.machine.processor import processor
from meshwright.planner.plan import check_legal, on_cluster, setting_of
from meshwright.runtime.pricing.correction import (
    applied,
    keep_correction,
    measurement_of,
    uncorrected,
)
from meshwright.spec.loading import Config
from meshwright.units import GIB, parse_bytes, parse_seconds

_TYPED: Final = ("layout", "step", "memory")


class Corrected(NamedTuple):
    """A corrected calibration, its correction, and the file that stores it."""

    calibration: Calibration
    corrections: tuple[Correction, ...]
    file: Path | None = None

    @property
    def document(self) -> list[dict[str, Any]]:
        """The correction as JSON."""
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
        """Print the conclusion."""
        for correction in self.corrections:
            for text in correction.text:
                say(f"measured: {text}")
        if self.file is not None:
            say(f"kept for this cluster: {self.file}; --no-keep leaves it out, deleting it forgets")


def add_measured(parser: argparse.ArgumentParser, metavar: str, *, keeps: bool = True) -> None:
    """Add `--measured`, and `--no-keep` if the result is stored."""
    parser.add_argument("--measured", action="append", nargs="+", default=[], metavar=metavar)
    if keeps:
        parser.add_argument(
            "--no-keep", action="store_true", help="correct by --measured this time only"
        )


def take_measured(args: argparse.Namespace) -> list[str]:
    """Return the measurements in `--measured`; other words return to the config.

    `layout=tp8 mb1 step=13.9s` may be typed with or without quotes.
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
            elif index == 0 or (not has_value and Path(word).suffix in (".json", ".jsonl")):
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
) -> Corrected | None:
    """Return a calibration corrected by measurements of a config's cluster; None without any.

    Raises `ConfigError` for unreadable ones, and for those of another device or system.
    """
    if not named:
        return None
    is_named = calibration is not None
    base = calibration or calibration_named(config.cluster.calibration)
    base = uncorrected(base)
    setting = setting_of(config, base, processor=processor())
    measurements: list[Measurement] = []
    for text in named:
        for measurement in _read(text, config, base):
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
    """Return a calibration corrected by rows and runs, for each system and device."""
    if not named:
        return None
    base = uncorrected(calibration)
    corrections = corrected(
        (measurement for text in named for measurement in _read(text, None, base)), base
    )
    return Corrected(applied(base, corrections), tuple(corrections))


def _read(text: str, config: Config | None, base: Calibration) -> Iterator[Measurement]:
    """Yield the measurements that an argument names: a run's, rows', or typed ones."""
    if text.partition("=")[0] in _TYPED:
        if config is None:
            raise ConfigError(f"--measured {text}: a layout needs a model; name rows, or a run")
        yield _typed(text, config, base)
    elif Path(text).is_dir():
        yield measurement_of(Path(text), base)
    elif Path(text).is_file():
        yield from _of_rows(Path(text), base)
    else:
        raise ConfigError(
            f"--measured {text}: neither a run folder, nor a file of rows, nor "
            "'layout=shard8 zero3 mb1 step=13.9s memory=61GiB'"
        )


def _typed(text: str, config: Config, base: Calibration) -> Measurement:
    values = {
        match[1]: match[2].strip()
        for match in re.finditer(r"(\w+)=(.*?)(?=\s+\w+=|$)", text.replace(",", " "))
    }
    if "layout" not in values or not values.keys() & {"step", "memory"}:
        raise ConfigError(f"--measured {text}: it needs a layout, and step, memory or both")
    layout = Layout.parse(values["layout"])
    setting = setting_of(config, base, processor=processor())
    check_legal(setting, layout)
    try:
        seconds = parse_seconds(values["step"]) if "step" in values else None
        peak_bytes = float(parse_bytes(values["memory"])) if "memory" in values else None
    except ValueError as error:
        raise ConfigError(f"--measured {text}: {error}") from None
    return Measurement(on_cluster(setting, layout), layout, seconds, peak_bytes, name=text)


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
