"""What the commands share: config arguments and JSON on stdout."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from meshwright.errors import ConfigError
from meshwright.launch.measured import as_measured_here
from meshwright.spec.loading import Config, load_config

# Of a layout's label: "interleaved_zero_bubble".
LONGEST_WORD = 23


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `[CONFIG.toml] [section.key=value ...]`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG.toml | section.key=value",
        help="a config file, then overrides; without a file the built-in defaults apply",
    )


def read_config(args: argparse.Namespace, default: Path | None = None) -> Config:
    """Return the config that the arguments name, or that of a default file under overrides.

    It is priced by what was measured of this machine, if anything was: `launch.measured`. Raises
    `ConfigError`.
    """
    file, overrides = read_words(args)
    return as_measured_here(load_config(file or default, overrides), os.environ)


def read_words(args: argparse.Namespace) -> tuple[Path | None, list[str]]:
    """Return the config file that the arguments name, if any, and the overrides."""
    files = [word for word in args.words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"one config file at most, but there are {len(files)}: {' '.join(files)}")
    overrides = [word for word in args.words if "=" in word]
    return Path(files[0]) if files else None, overrides


def say(text: str, indent: str = "") -> None:
    """Print a line, wrapped to the width of the terminal, or to 80 columns where it is none."""
    width = Console().width
    print(textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent + "  "))


def table(*columns: str, wraps: Collection[str] = ("layout", "change", "why not")) -> Table:
    """Return a table that keeps to the width of the terminal: the columns `wraps` give way."""
    made = Table(box=None, pad_edge=False)
    for name in columns:
        least = LONGEST_WORD if name == "layout" else None
        made.add_column(name, overflow="fold", no_wrap=name not in wraps, min_width=least)
    return made


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def print_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=1))


def add_accept(parser: argparse.ArgumentParser) -> None:
    """Add `--accept KEY[,KEY]`."""
    parser.add_argument(
        "--accept",
        metavar="KEY[,KEY]",
        default="",
        help="unsupported keys of the file that may be left out; all: every one",
    )
