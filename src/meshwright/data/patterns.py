"""Refuses regular expressions of a tokenizer.json that can take exponential time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from meshwright.parsing import parse_json

_LONGEST: Final = 10_000  # characters; those of known tokenizers have some hundred
# What a pattern is made of: an escape, a class, the begin or end of a group, how often, or.
_PART: Final = re.compile(
    r"(?P<atom>\\.|\[(?:\\.|\[:\^?\w+:\]|[^\]\\])*\])|(?P<open>\((?:\?(?:[:=!>]|<[=!]|[a-z-]+:?))?)"
    r"|(?P<close>\))|(?P<often>[*+]|\{\d*,\})(?P<keeps>\+?)|(?P<or>\|)|(?P<other>.)",
    re.DOTALL,
)


def check_patterns(content: bytes) -> None:
    """Raise `ValueError` for a tokenizer.json with an exponential pattern.

    Matching can take time that doubles with each character if an unbounded repetition applies to a
    group that contains one itself, or alternatives: `(a+)+`, `(a|a)*`.
    """
    if b'"Regex"' not in content:
        return
    for pattern in _patterns(parse_json(content)):
        if len(pattern) > _LONGEST:
            raise ValueError(f"a pattern has {len(pattern)} characters; at most {_LONGEST}")
        if group := _doubling(pattern):
            raise ValueError(
                f"the pattern {pattern!r:.200} repeats the group {group!r:.100}, which can be "
                "matched in more than one way: a text can make it take forever"
            )


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        regex = value.get("Regex")
        if isinstance(regex, str):
            yield regex
        for key, child in value.items():
            if key not in ("vocab", "merges"):
                yield from _patterns(child)
    elif isinstance(value, list):
        for child in value:
            yield from _patterns(child)


def _doubling(pattern: str) -> str:
    """Return the first group of a pattern that can take exponential time; empty if none can."""
    opened: list[tuple[int, bool]] = []  # where a group begins, and whether it can match in ways
    many, closed = False, (0, 0, False)
    for part in _PART.finditer(pattern):
        if part["open"]:
            opened.append((part.start(), many))
            many = False
        elif part["close"] and opened:
            start, before = opened.pop()
            closed = (start, part.end(), many)
            many = many or before
        elif part["often"]:
            if closed[1] == part.start() and closed[2] and not part["keeps"]:
                return pattern[closed[0] : part.end()]
            many = True
        elif part["or"]:
            many = True
    return ""
