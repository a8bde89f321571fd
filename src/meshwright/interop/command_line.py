"""A command line, or a shell script that builds one, to arguments; nothing is executed.

Understood: `NAME=value`, `export`, arrays `NAME=( ... )` and `NAME+=( ... )`, `$NAME`, `${NAME}`,
`${NAME[@]}`, `${NAME:-default}` and line continuation. What a script computes is not: such a value
stays as it is written, and is reported.
"""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

from meshwright.errors import ConfigError
from meshwright.parsing import MAX_DIGITS

_ASSIGNMENT = re.compile(
    r"^[ \t]*(?:export[ \t]+)?(\w+)(\+?)=(\((?:[^()]|\([^()]*\))*\)|\"[^\"]*\"|'[^']*'|[^\s;]*)",
    re.MULTILINE,
)
_LONGEST = 1_000_000
_REFERENCE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\}|(\w+))")
_PRODUCT = re.compile(r"\$\(\(([\d\s*+()-]+)\)\)")


def read_arguments(text: str, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a command line's `--name value ...` by name, and the names with different values.

    A flag alone is true, several values are a list. Conditions of a script are not evaluated: where
    that, or a repetition, gives a name two values, the second result says which. Raises
    `ConfigError` for unmatched quotes, and where there is no argument.
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
    """Return a product of whole numbers; any other arithmetic stays as it is written."""
    factors = [part.strip() for part in text.split("*")]
    if not all(factor.isdigit() for factor in factors):
        return f"$(({text}))"
    if sum(map(len, factors)) > MAX_DIGITS:
        return f"$(({text}))"
    return str(math.prod(map(int, factors)))


def _parts(word: str) -> list[str]:
    """Split an array's element such as `"--split '99,1,0'"`, which bash joins into the line."""
    return shlex.split(word) if word.startswith("--") and " " in word else [word]


def _arguments(tokens: list[str]) -> list[tuple[str, Any]]:
    """Return each argument with its value: true, one value, or a list."""
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
    """Return a number where a word is one."""
    if len(word) > MAX_DIGITS:
        return word
    for kind in (int, float):
        try:
            return kind(word) if "_" not in word else word
        except ValueError:
            continue
    return word
