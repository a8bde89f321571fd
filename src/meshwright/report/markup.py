"""`Html`: text that is already HTML; all other text is escaped when it enters a page."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Html(str):
    """HTML that is safe as it is. Joining it with other text escapes that text."""

    __slots__ = ()

    def __add__(self, other: str) -> Html:
        """Return both, one after the other."""
        return Html(str.__add__(self, escape(other)))


def escape(value: object) -> Html:
    """Return a value as HTML: escaped text, or itself if it is HTML.

    Also escapes what charts would interpret as HTML in their texts.
    """
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def markup(template: str, *parts: object, **named: object) -> Html:
    """Return an HTML template, in the syntax of `str.format`, filled with escaped values."""
    shown = {name: escape(value) for name, value in named.items()}
    return Html(template.format(*map(escape, parts), **shown))


def joined(parts: Iterable[object], between: str = "") -> Html:
    """Return escaped values one after the other; `between` is HTML."""
    return Html(between.join(map(escape, parts)))
