"""Files to flat keys: JSON, YAML and TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import yaml

from meshwright import files
from meshwright.errors import ConfigError
from meshwright.parsing import check_size, parse_json

System = Literal[
    "accelerate",
    "axolotl",
    "deepspeed",
    "gpt-neox",
    "hf",
    "megatron",
    "ms-swift",
    "nemo",
    "prime-rl",
    "torchtitan",
    "transformers",
]
SYSTEMS: Final[tuple[System, ...]] = get_args(System)


_MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-5 for text; as in 1.2, it is a number here."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def read_text(path: Path) -> str:
    """Return a file's text; raises `ConfigError` where it cannot be read."""
    try:
        return files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the JSON, YAML or TOML mapping of a file; raises `ConfigError` where there is none."""
    text = read_text(path)
    try:
        if path.suffix == ".json":
            content = parse_json(text, lambda pairs: _once(path, pairs))
        elif path.suffix == ".toml":
            content = tomllib.loads(text)
        else:
            content = _read_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid {_language(path)}: {where}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} is not a mapping of keys to values")
    return {str(key): value for key, value in content.items()}


def _read_yaml(text: str) -> Any:
    try:
        content = yaml.load(text, Loader=_Loader)
    except (RecursionError, OverflowError, TypeError) as error:
        raise ValueError(str(error)) from None
    check_size(content, _MOST_VALUES)  # a few aliases of aliases would stand for billions
    return content


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that a file has twice: the first would be dropped silently."""
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ConfigError(f"{path} has the key {name} twice; keep one")
        content[name] = value
    return content


def _language(path: Path) -> str:
    return {".json": "JSON", ".toml": "TOML"}.get(path.suffix, "YAML")


def flatten(content: Mapping[str, Any], *, dashes: bool = False) -> dict[str, Any]:
    """Return nested mappings as dotted keys; an empty mapping is a value of its own.

    With `dashes`, a dash in a name means an underscore, as GPT-NeoX reads it. Raises `ConfigError`
    where both spellings stand side by side with different values.
    """
    flat: dict[str, Any] = {}

    def visit(prefix: str, mapping: Mapping[str, Any]) -> None:
        for name, value in mapping.items():
            key = prefix + (str(name).replace("-", "_") if dashes else str(name))
            if isinstance(value, Mapping) and value:
                visit(f"{key}.", value)
                continue
            if key in flat and flat[key] != value:
                raise ConfigError(f"{key} is there twice, as {flat[key]!r} and as {value!r}")
            flat[key] = value

    visit("", content)
    return flat


def merge(files: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of several files, and for each that two of them give differently, how.

    The later file's value is kept.
    """
    merged: dict[str, Any] = {}
    owner: dict[str, str] = {}
    clashes: dict[str, str] = {}
    for name, values in files.items():
        for key, value in values.items():
            if key in merged and merged[key] != value:
                clashes[key] = f"{merged[key]!r} in {owner[key]}, {value!r} in {name}"
            merged[key], owner[key] = value, name
    return merged, clashes
