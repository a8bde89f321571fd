"""Reads JSON, YAML, TOML and command lines as flat keys, without executing anything.

In a shell script that builds a command line, these are understood: `NAME=value`, `export`, arrays
`NAME=( ... )` and `NAME+=( ... )`, `$NAME`, `${NAME}`, `${NAME[@]}`, `${NAME:-default}` and line
continuation. A value that a script computes stays as it is written, and is reported.
"""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from meshwright import files
from meshwright.errors import ConfigError
from meshwright.parsing import MAX_DIGITS, check_size, parse_json

if TYPE_CHECKING:
    import yaml

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


@lru_cache(maxsize=1)
def _loader() -> type[yaml.SafeLoader]:
    """Return a YAML loader that reads 1e-5 as a number, as in YAML 1.2; in YAML 1.1 it is text."""
    import yaml  # not at the top: most plans read none

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
        list("-+0123456789."),
    )
    return Loader


def read_text(path: Path) -> str:
    """Return a file's text; raises `ConfigError` if it cannot be read."""
    try:
        return files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the content of a JSON, YAML or TOML file.

    Raises `ConfigError` if it is not a mapping.
    """
    text = read_text(path)
    try:
        if path.suffix == ".json":
            content = parse_json(text, lambda pairs: _once(path, pairs))
        elif path.suffix == ".toml":
            content = tomllib.loads(text)
        else:
            content = _read_yaml(text)
    except ValueError as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid {_language(path)}: {where}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} is not a mapping of keys to values")
    return {str(key): value for key, value in content.items()}


def _read_yaml(text: str) -> Any:
    import yaml

    try:
        content = yaml.load(text, Loader=_loader())
    except (RecursionError, OverflowError, TypeError, yaml.YAMLError) as error:
        raise ValueError(str(error)) from None
    check_size(content, _MOST_VALUES)  # a few aliases of aliases would stand for billions
    return content


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return JSON pairs as a dict; raises `ConfigError` if a key occurs twice."""
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ConfigError(f"{path} has the key {name} twice; keep one")
        content[name] = value
    return content


def _language(path: Path) -> str:
    return {".json": "JSON", ".toml": "TOML"}.get(path.suffix, "YAML")


def flatten(content: Mapping[str, Any], *, dashes: bool = False) -> dict[str, Any]:
    """Return nested mappings as one dict with dotted keys; an empty mapping is a value.

    With `dashes`, a dash in a name means an underscore, as in GPT-NeoX. Raises `ConfigError` if
    both spellings of a key have different values.
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
    """Return the keys of several files; a later file's value replaces an earlier one.

    The second result describes, for each key with different values, which file has which.
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


_ASSIGNMENT = re.compile(
    r"^[ \t]*(?:export[ \t]+)?(\w+)(\+?)=(\((?:[^()]|\([^()]*\))*\)|\"[^\"]*\"|'[^']*'|[^\s;]*)",
    re.MULTILINE,
)
_LONGEST = 1_000_000
_REFERENCE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\}|(\w+))")
_PRODUCT = re.compile(r"\$\(\(([\d\s*+()-]+)\)\)")


def read_arguments(text: str, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options `--name value ...` of a command line by name.

    An option without a value is True; several values are a list. Conditions of a script are not
    evaluated; the second result describes each name that has different values because of this, or
    because it is repeated. Raises `ConfigError` for unmatched quotes, and if there is no option.
    """
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text.replace("\\\n", " "))
    variables: dict[str, str] = {}
    for variable, adds, value in _ASSIGNMENT.findall(text):
        value = value.strip()
        value = value[1:-1] if value[:1] in ("(", '"', "'") else value
        resolved = _resolve(" ".join(value.split()), variables)
        variables[variable] = (f"{variables.get(variable, '')} " if adds else "") + resolved
    commands = _ASSIGNMENT.sub("", text)
    lines = [line for line in commands.splitlines() if "--" in _resolve(line, variables)]
    try:
        tokens = [w for line in lines for w in (*shlex.split(_resolve(line, variables)), ";")]
        tokens = [part for word in tokens for part in _parts(word)]
    except ValueError as error:
        raise ConfigError(f"{name} cannot be read as a command line: {error}") from None
    arguments: dict[str, Any] = {}
    clashes: dict[str, str] = {}
    for argument, value in _arguments(tokens):
        if argument in arguments and arguments[argument] != value:
            clashes[argument] = f"given as {arguments[argument]!r} and as {value!r}"
        arguments[argument] = value
    if not arguments:
        raise ConfigError(f"{name} has no argument of the form --name value")
    return arguments, clashes


def _resolve(text: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        variable = match[1] or match[3]
        if variable in variables:
            return variables[variable]
        default = match[2]
        return str(match[0]) if default is None else default.strip("\"'")

    for _ in range(8):  # a variable may hold another's name
        new = _REFERENCE.sub(value, text)
        if len(new) > _LONGEST:
            raise ConfigError(f"its variables make a text of more than {_LONGEST} characters")
        if new == text:
            break
        text = new
    return _PRODUCT.sub(lambda m: str(_product(m[1])), text)


def _product(text: str) -> str:
    """Return the value of a shell product such as `2*8`; other arithmetic stays as written."""
    factors = [part.strip() for part in text.split("*")]
    if not all(factor.isdecimal() for factor in factors):
        return f"$(({text}))"
    if sum(map(len, factors)) > MAX_DIGITS:
        return f"$(({text}))"
    return str(math.prod(map(int, factors)))


def _parts(word: str) -> list[str]:
    """Return the words of an array element such as `"--split '99,1,0'"`, as bash expands it."""
    return shlex.split(word) if word.startswith("--") and " " in word else [word]


def _arguments(tokens: list[str]) -> list[tuple[str, Any]]:
    """Return (name, value) for each option: True, one value, or a list of values."""
    arguments: list[tuple[str, list[Any]]] = []
    is_open = False
    for word in tokens:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            arguments.append((name.replace("_", "-"), [_typed(value)] if equals else []))
            is_open = True
        elif word.endswith(".py") or word in (";", "&&", "&", "|"):
            is_open = False  # the script that a launcher starts, or the end of the command
        elif is_open:
            arguments[-1][1].append(_typed(word))
    return [
        (name, True if not values else values[0] if len(values) == 1 else values)
        for name, values in arguments
    ]


def _typed(word: str) -> Any:
    """Return a word as an int or float if it is a number, else unchanged."""
    if len(word) > MAX_DIGITS:
        return word
    for kind in (int, float):
        try:
            return kind(word) if "_" not in word else word
        except ValueError:
            continue
    return word
