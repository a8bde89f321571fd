"""Small tables as plain text and as HTML: what Python's prompt and a notebook show of a result."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in columns of plain text, without blanks at the ends of lines."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(map(str.ljust, line, widths)).rstrip()
        for line in lines  # the last is ragged
    )


def html_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], above: Iterable[str] = ()
) -> str:
    """Return an HTML table of escaped texts, after a paragraph for each line of `above`."""
    paragraphs = "".join(f"<p>{html.escape(line)}</p>" for line in above)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"{paragraphs}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
