"""Wraps text to the width of a terminal, only between words."""

from __future__ import annotations

import os
import textwrap
from typing import Any, Final

# Of what is not a terminal, or a terminal that does not say.
WIDTH: Final = 80
# Ends a line of a command that goes on in the next one.
GOES_ON: Final = " \\"


def folded(text: str, width: int, *, joint: str = "") -> str:
    """Return a text with lines of at most `width` columns; a longer word stays whole.

    Continued lines are indented by two more columns. `joint` ends each line that continues:
    `GOES_ON` for commands to paste into a shell.
    """
    lines: list[str] = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        parts = textwrap.wrap(
            line,
            width - len(joint),
            subsequent_indent=indent + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [part + joint for part in parts[:-1]] + (parts[-1:] or [""])
    return "\n".join(lines)


def fitted(text: str, out: Any, *, joint: str = "") -> str:
    """Return a text for a stream: `folded` for a terminal, unchanged for a file or a pipe.

    Users grep logs line by line.
    """
    width = _width(out)
    return text if width is None else folded(text, width, joint=joint)


def _width(out: Any) -> int | None:
    """Return the columns of a terminal, None where a stream is none."""
    try:
        return os.get_terminal_size(out.fileno()).columns or WIDTH if out.isatty() else None
    except (OSError, ValueError):  # it is closed, or has no file
        return None
