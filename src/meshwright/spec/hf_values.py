"""Typed values of a `config.json`: raises a `ConfigError` that names key and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from meshwright.errors import ConfigError

_LARGEST: Final = 1e300
# Rows and columns of a block of numbers in fp8 that have one scale.
FP8_BLOCK: Final = 128
# A key as messages name it, and its value; None: absent.
Found = tuple[str, Any]


def size(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number of at least 1."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} = {value!r} must be a whole number of at least 1")
    return value


def count(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number of at least 0."""
    return 0 if config.get(key, default) == 0 else size(config, key, default)


def optional_size(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number of at least 1, or 0 if the key is null."""
    return 0 if config.get(key, default) is None else size(config, key, default)


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """Return a number."""
    value = config.get(key)
    return default if value is None else as_number(key, value)


def optional(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """Return a number, or None if the key is null."""
    value = config.get(key, default)
    return None if value is None else as_number(key, value)


def as_number(name: str, value: object) -> float:
    """Return a value that must be a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} = {value!r} must be a number")
    if not -_LARGEST < value < _LARGEST:  # nor one that is not a number
        raise ConfigError(f"{name} = {format(value, '.3g')} is beyond any that a config has")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return true or false."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"{key} = {value!r} must be true or false")
    return value


def at(source: Mapping[str, Any], key: str, inside: str = "") -> Found:
    """Return a key's full name, and its value in a table or None."""
    return (f"{inside}.{key}" if inside else key), source.get(key)


def agree(spellings: Sequence[Found], default: Any) -> Found:
    """Return the value that all spellings give, with the name of the first."""
    stated = [(name, value) for name, value in spellings if value is not None]
    for name, value in stated[1:]:
        if value != stated[0][1]:
            raise ConfigError(
                f"{stated[0][0]} = {stated[0][1]!r} and {name} = {value!r} must agree; keep one"
            )
    return stated[0] if stated else (spellings[0][0], default)


def agreed_number(spellings: Sequence[Found], default: float) -> tuple[str, float]:
    """Return the number that all spellings give, with the name of the first."""
    numbers = [(n, None if value is None else as_number(n, value)) for n, value in spellings]
    return agree(numbers, default)
