"""What the commands share: config arguments, printing, tables and JSON on stdout."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from meshwright.errors import ConfigError, refusal
from meshwright.files import read_text
from meshwright.lines import GOES_ON, fitted, folded
from meshwright.parsing import parse_json
from meshwright.runtime.pricing.measured import as_measured_here
from meshwright.spec import hub
from meshwright.spec.loading import KEYS, Config, load_config
from meshwright.spec.presets import preset_of
from meshwright.spec.stored import CONFIG, HF_CONFIG
from meshwright.store import StorePath, is_url

# Of a layout's label: "interleaved_zero_bubble".
LONGEST_WORD = 23


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `[CONFIG.toml] [section.key=value ...]` to a parser."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG.toml | MODEL | RUN | section.key=value",
        help="a config file, a model's folder or its config.json, or a run, then overrides; "
        "without any the built-in defaults apply",
    )


def read_config(
    args: argparse.Namespace, default: Path | None = None, *, plans: bool = False
) -> Config:
    """Return the config that the arguments name; `default` is the file if they name none.

    Predictions for it use a stored calibration of this machine, if there is one; see
    `runtime.pricing.measured`. `plans` as in `load_config`. Raises `ConfigError`.
    """
    file, overrides = read_words(args)
    return as_measured_here(load_config(file or default, overrides, plans=plans), os.environ)


def moment(text: str) -> str:
    """Return a moment such as "B 0 1, loss" with its action in the short form, "0B1, loss".

    The numbers are the stage and the microbatch.
    """
    return re.sub(r"^([A-Z]+(?:_[FB])?) (\d+) (\d+)", r"\2\1\3", text)


def local_folder(text: str) -> Path:
    """Return a folder of this machine; raises `ConfigError` for a URL: how to bring it here."""
    if is_url(text):
        url = StorePath.parse(text)
        hint = f"Bring it here with `meshwright checkpoint fetch {url} OUT`, and give OUT"
        raise ConfigError(refusal(f"{url} is in an object store", hint=hint))
    return Path(text)


def read_words(args: argparse.Namespace) -> tuple[Path | None, list[str]]:
    """Return the config file that the arguments name, or None, and the overrides.

    A model's folder or name becomes an override. Raises `ConfigError` for other arguments.
    """
    files = [Path(word) for word in args.words if "=" not in word]
    overrides = [word for word in args.words if "=" in word]
    for path in files:  # a model's folder, or the file of its sizes
        folder = path.parent if path.name == HF_CONFIG else path
        if not (folder / CONFIG).is_file() and (folder / HF_CONFIG).is_file() and folder != Path():
            overrides.insert(0, f"model.init_from={folder}")
            files.remove(path)
            break
    models = []  # by their names
    for word in (word for word in args.words if "=" not in word and not Path(word).exists()):
        _refuse_two_words(word, args.words)
        if preset_of(word) is not None:
            models.append(f"model.preset={word}")
        elif hub.is_model(word):
            models.append(f"model.init_from={word}")
        else:
            continue
        files.remove(Path(word))
    if len(models) > 1:
        listed = " ".join(text.partition("=")[2] for text in models)
        raise ConfigError(f"one model at most, but there are {len(models)}: {listed}")
    overrides[:0] = models
    if len(files) > 1:
        shown = " ".join(map(str, files))
        raise ConfigError(f"one config file at most, but there are {len(files)}: {shown}")
    if files and (files[0] / CONFIG).is_file():  # a run
        return files[0] / CONFIG, overrides
    return files[0] if files else None, overrides


def model_folder(word: str) -> Path:
    """Return the folder of a model whose weights a command needs, by its path or Hub id.

    Downloads what is missing. Raises `ConfigError` as `local_folder` for a URL.
    """
    local_folder(word)
    return hub.folder_with_weights(word, lambda text: say_line(text, sys.stderr))


def _refuse_two_words(word: str, arguments: Sequence[str]) -> None:
    """Raise `ConfigError` if an argument is a config key without a value, as in `layout.tp 2`."""
    section, _, key = word.partition(".")
    if key not in KEYS.get(section, ()):
        return
    following = [other for other in arguments[arguments.index(word) + 1 :] if "=" not in other]
    value = following[0] if following else "VALUE"
    rule = f"{' '.join([word, *following[:1]])}: a key and its value are one word"
    raise ConfigError(refusal(rule, legal=[f"{word}={value}"]))


def say(text: str, indent: str = "", out: TextIO | None = None) -> None:
    """Print a text, wrapped to the width of the terminal, or to 80 columns without one."""
    print(folded(indent + text, Console().width), file=out)


def say_line(text: str, out: TextIO | None = None) -> None:
    """Print a line that users may grep: wrapped in a terminal, but not in a file or a pipe."""
    out = sys.stdout if out is None else out
    print(fitted(text, out), file=out, flush=True)


def say_command(command: str, indent: str = "  ") -> None:
    """Print a shell command that can be pasted, continued over as many lines as it needs."""
    print(folded(indent + command, Console().width, joint=GOES_ON))


def table(*columns: str, wraps: Collection[str] = ("layout", "change", "why not")) -> Table:
    """Return a table with the named columns; those in `wraps` are wrapped to fit the terminal."""
    printed = Table(box=None, pad_edge=False)
    for name in columns:
        min_width = LONGEST_WORD if name == "layout" else None
        printed.add_column(name, overflow="fold", no_wrap=name not in wraps, min_width=min_width)
    return printed


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json` to a parser."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def print_json(value: Any) -> None:
    """Print a value as one JSON document."""
    print(json.dumps(value, indent=1))


def add_accept(parser: argparse.ArgumentParser) -> None:
    """Add the option `--accept KEY[,KEY]` to a parser."""
    parser.add_argument(
        "--accept",
        metavar="KEY[,KEY]",
        default="",
        help="unsupported keys of the file that may be left out; all: every one",
    )


def read_rows(path: Path, needed: str) -> list[dict[str, Any]]:
    """Return the objects in a JSON Lines file; `needed` is the option that names the file.

    Raises `ConfigError` if it cannot be read or a line is not a JSON object.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{needed} {path} cannot be read: {problem}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number} is not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number} is not a JSON object")
        rows.append(row)
    return rows
