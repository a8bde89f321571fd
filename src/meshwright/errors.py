"""Every error that Meshwright raises on purpose, with its exit code.

A message to a user has three parts: the rule, the values that break it, and the nearest legal
values. `refusal` combines them, so that all packages word them alike.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence

_LONG_WORD = re.compile(r"\S{5000,}")

_LONGEST_NAME = 200

EXIT_DONE = 0
EXIT_CHECK_FAILED = 1
EXIT_REFUSED = 2
EXIT_RANK_FAILED = 3
EXIT_STOPPED = 4
EXIT_NO_PROGRESS = 5


class MeshwrightError(Exception):
    """Base of all errors that are meant for the user, shown without a traceback.

    Words longer than any path are cut: they are values from a file that nobody wrote by hand.
    """

    exit_code = EXIT_CHECK_FAILED

    def __init__(self, text: str = "") -> None:
        super().__init__(_LONG_WORD.sub(_cut, text))


class ConfigError(MeshwrightError):
    """A config, an override or a command line that is refused before any process starts."""

    exit_code = EXIT_REFUSED


class DataError(MeshwrightError):
    """A corpus, a tokenizer or an indexed store that cannot be used as it is."""

    exit_code = EXIT_REFUSED


class CheckpointError(MeshwrightError):
    """A checkpoint or a model folder that is missing, incomplete or corrupt."""

    exit_code = EXIT_REFUSED


class Diverged(MeshwrightError):
    """A non-finite gradient, if such steps are not skipped."""


class RankFailed(MeshwrightError):
    """A rank raised an error, was killed or stopped responding."""

    exit_code = EXIT_RANK_FAILED


class NoProgress(MeshwrightError):
    """Ranks failed repeatedly, without completing a step."""

    exit_code = EXIT_NO_PROGRESS


class StoppedOnRequest(MeshwrightError):
    """The run was asked to stop (SIGTERM, Ctrl-C) and stopped after saving."""

    exit_code = EXIT_STOPPED


def lacks_training(command: str) -> ConfigError:
    """Return the error to raise where `command` needs torch, and torch is not installed."""
    return ConfigError(
        f'{command} needs PyTorch, which is not installed: pip install "meshwright[train]"'
    )


def _cut(word: re.Match[str]) -> str:
    return f"{word[0][:100]}... ({len(word[0])} characters)"


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return up to `count` of the known names closest in spelling to `name`.

    Names that begin with it come first: for `a100`, `a100-80gb` comes before `a800`.
    """
    if len(name) > _LONGEST_NAME:  # comparing takes the square of it
        return []
    names = [candidate for candidate in known if candidate and len(candidate) <= _LONGEST_NAME]
    longer = [candidate for candidate in names if len(name) > 1 and candidate.startswith(name)]
    shorter = [
        candidate for candidate in names if len(candidate) > 1 and name.startswith(candidate)
    ]
    close: list[str] = []
    for pool, cutoff in ((longer, 0.0), (shorter, 0.0), (names, 0.5)):
        close += difflib.get_close_matches(name, pool, n=count, cutoff=cutoff)
    return list(dict.fromkeys(close))[:count]


def nearest_divisors(value: int, near: int, count: int = 2) -> list[int]:
    """Return the divisors of `value` nearest to `near`, in ascending order."""
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    divisors = {*small, *(value // d for d in small)}
    return sorted(sorted(divisors, key=lambda d: (abs(d - near), d))[:count])


def either(values: Iterable[object]) -> str:
    """Return alternatives as "a, b or c"; empty for none."""
    *leading, last = ["", *map(str, values)]
    return f"{', '.join(leading[1:])} or {last}" if len(leading) > 1 else last


def refusal(rule: str, *, legal: Sequence[object] = (), hint: str = "") -> str:
    """Return the text of an error: `rule; nearest legal: A or B. hint`, without the empty parts.

    `rule` is the broken rule with its values, `legal` are the legal values nearest to them, and
    `hint` says what to do.
    """
    text = rule
    if legal:
        text += f"; nearest legal: {either(legal)}"
    return f"{text}. {hint}" if hint else text
