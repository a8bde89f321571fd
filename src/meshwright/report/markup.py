"""`Html`: text that is HTML already; all other text is escaped on its way into a page."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Html(str):
    """HTML that is safe as it is. Joined with any other text it escapes that."""

    __slots__ = ()

    def __add__(self, other: str) -> Html:
        """Return both, one after the other."""
        return Html(str.__add__(self, escape(other)))


def escape(value: object) -> Html:
    """Return a value as HTML: its text letter by letter, or itself where it is HTML.

    Charts read a little HTML in their texts, too.
    """
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def markup(template: str, *parts: object, **named: object) -> Html:
    """Return a template of HTML, as `str.format` has it, filled with values that are escaped."""
    shown = {name: escape(value) for name, value in named.items()}
    return Html(template.format(*map(escape, parts), **shown))


def joined(parts: Iterable[object], between: str = "") -> Html:
    """Return values one after the other, escaped; `between` is HTML."""
    return Html(between.join(map(escape, parts)))
