"""`Page`: sections, charts with their tables, and the one HTML file that they become.

The file needs no server and no network: plotly.js and the figures are in it, compressed, and the
browser unpacks them. All text is plain HTML, so that it is there without any script.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib import resources, util
from pathlib import Path
from string import Template
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.report.colours import DARK
from meshwright.report.figure import Figure, rounded
from meshwright.version import __version__


@dataclass(frozen=True)
class Text:
    """HTML that is safe as it is; every other value in a table is escaped."""

    html: str


@dataclass
class Section:
    """A part of a page: the name of its landmark, its heading, its HTML."""

    id: str
    title: str
    parts: list[str]

    def html(self) -> str:
        """Return the section as a landmark."""
        body = "\n".join(self.parts)
        return (
            f'<section id="{self.id}" aria-labelledby="{self.id}-title">'
            f'<h2 id="{self.id}-title">{escape(self.title)}</h2>\n{body}\n</section>'
        )


@dataclass
class Page:
    """A page that is being made: `chart` keeps the figures, `section` the rest."""

    title: str
    subtitle: str
    sections: list[Section] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def section(self, name: str, title: str, *parts: str) -> None:
        """Add a section; one without parts is left out."""
        kept = [part for part in parts if part]
        if kept:
            self.sections.append(Section(name, title, kept))

    def chart(
        self,
        name: str,
        title: str,
        drawn: Figure | Mapping[str, Figure],
        told: str,
        table: str,
        *,
        key: str = "",
        zoom: bool = False,
        choose: str = "",
    ) -> str:
        """Return the HTML of a chart with its title, what it tells, and its numbers as a table.

        Several figures by name become a choice, labelled `choose`. `key` explains colours beside
        the title; `zoom` adds buttons that do by keyboard what dragging does.
        """
        many = {} if "data" in drawn else dict(drawn)
        first = next(iter(many.values())) if many else dict(drawn)
        self.figures[name] = list(many.values()) or [first]
        height = first["layout"]["height"]
        tools = _choice(name, choose, list(many)) if len(many) > 1 else ""
        tools += _zoom(name) if zoom else ""
        bar = f'<div class="tools">{tools}</div>' if tools else ""
        return (
            f'<figure class="chart" aria-labelledby="{name}-caption">'
            f'<figcaption id="{name}-caption"><h3>{escape(title)}</h3>{key}'
            f"<p>{told}</p></figcaption>{bar}"
            f'<div class="plot" id="{name}" data-figure="{name}" role="img" '
            f'aria-label="{escape(title)}. The numbers are in the table that follows." '
            f'style="height:{height}px"></div>'
            f"<details><summary>Numbers of this chart</summary>{table}</details></figure>"
        )

    def html(self) -> str:
        """Return the whole file."""
        links = "".join(
            f'<li><a href="#{one.id}">{escape(one.title)}</a></li>' for one in self.sections
        )
        words = {
            "title": escape(self.title),
            "subtitle": escape(self.subtitle),
            "links": links,
            "sections": "\n".join(one.html() for one in self.sections),
            "css": _asset("page.css"),
            "js": _asset("page.js"),
            "dark": json.dumps(dict(DARK)),
            "figures": _packed(json.dumps(rounded(self.figures), separators=(",", ":")).encode()),
            "plotly": _plotly(),
            "version": __version__,
        }
        return Template(_asset("page.html")).substitute(words)


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], *, caption: str = "") -> str:
    """Return a table: cells that are numbers or begin like one are set right."""
    if not rows:
        return "<p>Nothing to show.</p>"
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in headers)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption or "Table")}">'
        f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any) -> str:
    if isinstance(value, Text):
        return f"<td>{value.html}</td>"
    text = "–" if value is None else str(value)
    number = " class=n" if text[:1].isdigit() or (text[:1] in "+-−" and text[1:2].isdigit()) else ""
    return f"<td{number}>{escape(text)}</td>"


def facts(pairs: Sequence[tuple[str, str, str]]) -> str:
    """Return figures to be read at a glance: name, value, what it is beside."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(beside)}</small></dd></div>"
        for name, value, beside in pairs
    )
    return f'<dl class="facts">{items}</dl>'


def notices(said: Sequence[tuple[str, str]]) -> str:
    """Return warnings as a list: what is the matter, and what to do."""
    items = "".join(f"<li><strong>{_text(what)}</strong> {_text(todo)}</li>" for what, todo in said)
    return f'<ul class="notices">{items}</ul>' if said else ""


def prose(*sentences: str) -> str:
    """Return sentences as a paragraph."""
    text = " ".join(_text(one) for one in sentences if one)
    return f"<p>{text}</p>" if text else ""


def _text(text: str) -> str:
    """Return a text as HTML, what is between backquotes as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def key_of(pairs: Sequence[tuple[str, str]]) -> str:
    """Return what colours mean, each beside its colour."""
    items = "".join(
        f'<li><i data-colour="{colour}" style="background:{colour}"></i>{escape(name)}</li>'
        for name, colour in pairs
    )
    return f'<ul class="key">{items}</ul>'


def grid(*parts: str) -> str:
    """Return charts side by side where there is room."""
    kept = [part for part in parts if part]
    return f'<div class="grid">{"".join(kept)}</div>' if kept else ""


def folded(title: str, html: str) -> str:
    """Return HTML that is folded away under its title; print unfolds it."""
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def _choice(name: str, label: str, names: Sequence[str]) -> str:
    options = "".join(
        f'<option value="{at}">{escape(one)}</option>' for at, one in enumerate(names)
    )
    return f'<label>{escape(label)} <select data-for="{name}">{options}</select></label>'


def _zoom(name: str) -> str:
    deeds = (("in", "Zoom in"), ("out", "Zoom out"), ("left", "←"), ("right", "→"))
    names = {"left": "Move left", "right": "Move right"}
    buttons = "".join(
        f'<button type="button" data-for="{name}" data-do="{deed}" '
        f'aria-label="{names.get(deed, text)}">{text}</button>'
        for deed, text in (*deeds, ("all", "Whole step"))
    )
    return f'<span class="zoom">{buttons}</span>'


def _asset(name: str) -> str:
    return resources.files("meshwright.report").joinpath(name).read_text(encoding="utf-8")


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


@cache
def _plotly() -> str:
    """Return plotly.js, packed; the package is looked for, not imported, which takes a second."""
    found = util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        raise MeshwrightError("plotly is not installed: pip install plotly")
    root = Path(next(iter(found.submodule_search_locations)))
    return _packed((root / "package_data" / "plotly.min.js").read_bytes())
