"""Reads other systems' configs and prints what became of each key.

Shared by `config import` and `train --deepspeed`.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.errors import ConfigError
from meshwright.interop.flat import System
from meshwright.interop.import_report import VERDICTS, KeyReport, Report
from meshwright.interop.importing import Imported, import_files, refusal_text
from meshwright.interop.source import AUTO
from meshwright.layout import Machine, resolve_layout
from meshwright.runtime.machines.machine import detect
from meshwright.spec.dump import toml_value
from meshwright.spec.loading import Config, build_config, read_given
from meshwright.spec.resolve import Values

_STYLES: Mapping[str, str] = {
    "honoured": "green",
    "translated": "cyan",
    "ignored": "dim",
    "unsupported": "yellow",
    "contradictory": "bold red",
}


def import_config(
    paths: list[Path],
    overrides: list[str],
    *,
    base: Path | None,
    accept: str = "",
    system: System | None = None,
    devices: int | None = None,
) -> Imported:
    """Return the import of other systems' config files over a base config.

    `accept` lists unsupported keys to leave out. `devices` is the number of ranks, by default that
    of this machine.
    """
    if devices is not None and devices < 1:
        raise ConfigError(f"--devices {devices} must be at least 1")
    return import_files(
        paths,
        system=system,
        base=base,
        overrides=overrides,
        devices=devices or _devices(base, overrides),
        is_fixed=devices is not None or "WORLD_SIZE" in os.environ,
        accepted=[key for key in accept.split(",") if key],
    )


def _devices(base: Path | None, overrides: list[str]) -> int:
    """Return the number of ranks: WORLD_SIZE if it is set, else the devices of the cluster."""
    given = os.environ.get("WORLD_SIZE", "")
    if given.isdecimal():
        return int(given)
    cluster = [override for override in overrides if override.startswith("cluster.")]
    stated = read_given(base, cluster)
    only: dict[str, Values] = {section: {} for section in stated}
    config = build_config(only | {"cluster": stated["cluster"]})
    return detect(config.cluster, os.environ).devices * config.cluster.nodes


def settle(imported: Imported, devices: int | None = None) -> Config:
    """Return the config of an import; raises `ConfigError` if keys that matter are unsupported.

    With `devices`, also checks that a layout for them exists.
    """
    if imported.report.refused:
        raise ConfigError(refusal_text(imported.report))
    given = {section: dict(values) for section, values in imported.given.items()}
    config = build_config(given)
    if devices is not None:
        resolve_layout(config, Machine("cpu", devices, 1, "to import", is_fixed=False))
    return config


def train_config(args: argparse.Namespace, default: Path | None, out: TextIO) -> Config:
    """Return the config of `train --deepspeed`, after printing the keys that have no effect."""
    files = [word for word in args.words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"one config file at most, but there are {len(files)}: {' '.join(files)}")
    overrides = [word for word in args.words if "=" in word]
    base = Path(files[0]) if files else default
    imported = import_config(
        [args.deepspeed], overrides, base=base, accept=args.accept, system="deepspeed"
    )
    config = settle(imported)
    if os.environ.get("RANK", "0") == "0":
        print(summary(imported.report), file=out)
        for entry in imported.report.entries:
            if entry.verdict == "unsupported" or entry.value == AUTO:
                print(f"  {entry.key} = {entry.value}: {entry.note}", file=out)
        for filled in imported.report.filled:
            print(f"  {filled.key} = {_short(filled.value)}: {filled.reason}", file=out)
    return config


def summary(report: Report) -> str:
    """Return a line with the number of keys by verdict, such as "translated"."""
    counts = ", ".join(f"{report.count(v)} {v}" for v in VERDICTS if report.count(v))
    return f"{' + '.join(report.files)}: {report.keys} keys: {counts}"


def print_report(report: Report, out: TextIO) -> None:
    """Print a table with a row for each key of an import, then the effects of missing keys."""
    console = Console(file=out, width=None if out.isatty() else 80, highlight=False)
    widths = (26, 12, 14, max(console.width - 26 - 12 - 14 - 3, 20))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name, width in zip(("key", "value", "verdict", "here"), widths, strict=True):
        table.add_column(name, width=width)
    for entry in report.entries:
        mark = "!" if entry in report.refused else ""
        value = f"({_short(entry.value)})" if entry.is_default else _short(entry.value)
        verdict = Text(f"{entry.verdict}{mark}", _STYLES[entry.verdict])
        texts = (entry.key, value, _here(entry))
        key, value, effect = map(_folded, texts, (widths[0], widths[1], widths[3]))
        table.add_row(Text(key), Text(value), verdict, Text(effect))
    console.print(table)
    if report.filled:
        console.print("\nfollows from what the file leaves out:")
        defaults_table = Table(box=None, pad_edge=False, show_header=False)
        defaults_table.add_column(overflow="fold")
        defaults_table.add_column(overflow="fold")
        for filled in report.filled:
            defaults_table.add_row(
                Text(f"{filled.key} = {_short(filled.value)}"), Text(filled.reason)
            )
        console.print(defaults_table)
    console.print(f"\n{summary(report)}", soft_wrap=True)
    taken = report.count("honoured") + report.count("translated")
    console.print(f"{taken} of the {report.keys} keys take effect")


def _here(entry: KeyReport) -> str:
    to = ", ".join(f"{key} = {_short(value)}" for key, value in entry.to.items())
    return "; ".join(part for part in (to, entry.note) if part)


def _folded(text: str, width: int) -> str:
    """Return a text in lines of a given width; longer words are broken after `_`, `.` or `/`.

    A piece without any of these is broken at the width.
    """
    lines = [""]
    for word in text.split():
        parts = re.findall(rf"[^_./]{{1,{width - 1}}}[_./]?|[_./]", word)
        for index, part in enumerate([word] if len(word) <= width else parts):
            joined = f"{lines[-1]}{' ' if lines[-1] and index == 0 else ''}{part}"
            if len(joined) <= width:
                lines[-1] = joined
            else:
                lines.append(part)
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = "null" if value is None else toml_value(value)
    return text if len(text) <= 36 else f"{text[:33]}..."
