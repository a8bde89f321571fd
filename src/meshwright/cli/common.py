"""What the commands share: config arguments and JSON on stdout."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec.loading import Config, load_config


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

    Raises `ConfigError`.
    """
    files = [word for word in args.words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"one config file at most, but there are {len(files)}: {' '.join(files)}")
    overrides = [word for word in args.words if "=" in word]
    return load_config(files[0] if files else default, overrides)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def print_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=1))
