"""Reads untrusted JSON and TOML: any problem with a text is a `ValueError`.

Python's own parsers raise `RecursionError` for deeply nested texts, and their results for slightly
less nested ones overflow the stack of code that walks them.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from meshwright.errors import MeshwrightError

# Of lists and tables in each other; files of models and configs have less than ten.
MAX_DEPTH: Final = 64
# Of an integer; each of them fits into a float.
MAX_DIGITS: Final = 300
_TOO_LARGE: Final = 10**MAX_DIGITS
# C0 without \t and \n, DEL and C1; marks that change the direction of writing (UAX #9).
_CONTROL: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

_Pairs = list[tuple[str, Any]]


def parse_json(text: str | bytes, of_pairs: Callable[[_Pairs], Any] | None = None) -> Any:
    """Return the value of a JSON text; `of_pairs` makes objects, as in `json.loads`.

    Raises `ValueError` for anything else, and for nesting of more than `MAX_DEPTH` levels.
    """
    try:
        value = json.loads(text, object_pairs_hook=of_pairs, parse_int=_integer)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    brackets: tuple[Any, Any] = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MAX_DEPTH:
        check_size(value)
    return value


def distinct_keys(pairs: _Pairs) -> dict[str, Any]:
    """Return an object of a JSON text; raises `ValueError` if it has a key twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return table


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text; raises `ValueError` as `parse_json` does."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_size(tables)
    return tables


def check_size(value: Any, limit: int | None = None) -> None:
    """Raise `ValueError` for lists and tables nested more than `MAX_DEPTH` levels deep.

    Also for integers of more than `MAX_DIGITS` digits, and for more than `limit` values; a part
    that occurs several times counts each time.
    """
    level, count = [value], 0
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list | tuple):
                below.extend(item)
            elif isinstance(item, int) and abs(item) >= _TOO_LARGE:
                raise ValueError(_too_long("more than " + str(MAX_DIGITS)))
            if limit is not None and count + len(below) > limit:
                raise ValueError(f"it has more than {limit} values")
        if not below:
            return
        count += len(below)
        level = below
    raise ValueError(_TOO_DEEP)


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(_too_long(str(len(text))))
    return int(text)


def _too_long(digits: str) -> str:
    return f"it has an integer of {digits} digits; at most {MAX_DIGITS} are read"


@contextmanager
def foreign(source: str, error: type[MeshwrightError]) -> Iterator[None]:
    """Convert errors about a value's kind or size to an `error`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as raised:
        reason = f"it holds a value that is not as it should be ({type(raised).__name__}: {raised})"
        raise error(f"{source} cannot be read: {reason}") from raised


def printable(text: str) -> str:
    r"""Return a text with control characters as escapes such as `\x1b`.

    Keeps line ends and tabs. A terminal would act on control characters, including those that
    change the direction of writing.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


_TOO_DEEP: Final = f"it is nested more than {MAX_DEPTH} levels deep"
