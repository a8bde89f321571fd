"""`Page` collects sections and charts with their tables, and writes them as one HTML file.

The file needs no server and no network: plotly.js and the figures are in it, compressed, and the
browser unpacks them. All text is plain HTML, readable without any script.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from string import Template
from typing import Any, Final

from meshwright.report.figure import DARK, Figure, Html, Look, escape, joined, markup, rounded
from meshwright.version import __version__

# A number, its unit, and another number in brackets.
_NUMBER: Final = re.compile(r"[+\-−]?\d[\d.,]*\S*( \S+)?( \(\S+\))?")


@dataclass
class Section:
    """A section of a page: its id, its heading and its HTML."""

    id: str
    title: str
    parts: list[str]

    def html(self) -> Html:
        """Return the section as an HTML landmark."""
        return markup(
            '<section id="{id}" aria-labelledby="{id}-title">'
            '<h2 id="{id}-title">{title}</h2>\n{body}\n</section>',
            id=self.id,
            title=self.title,
            body=joined(self.parts, "\n"),
        )


@dataclass
class Page:
    """A page under construction, with its sections, and its figures by name."""

    title: str
    subtitle: str
    sections: list[Section] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def section(self, name: str, title: str, *parts: str) -> None:
        """Add a section unless all parts are empty; parts that are not `Html` are escaped."""
        nonempty = [part for part in parts if part]
        if nonempty:
            self.sections.append(Section(name, title, nonempty))

    def chart(
        self,
        name: str,
        title: str,
        drawn: Figure | Mapping[str, Figure],
        caption: str,
        table: str,
        *,
        key: str = "",
        zoom: bool = False,
        choose: str = "",
    ) -> Html:
        """Add a figure to the page, and return the HTML of its chart with caption and table.

        `drawn` is a figure, or several by name, of which the reader chooses one by a control
        labelled `choose`. `key` is a legend shown beside the title; `zoom` adds buttons that do
        what dragging does.
        """
        choices = {} if "data" in drawn else dict(drawn)
        first = next(iter(choices.values())) if choices else dict(drawn)
        self.figures[name] = list(choices.values()) or [first]
        height = first["layout"]["height"]
        tools = _choice(name, choose, list(choices)) if len(choices) > 1 else Html()
        tools += _zoom(name) if zoom else Html()
        return markup(
            '<figure class="chart" aria-labelledby="{name}-caption">'
            '<figcaption id="{name}-caption"><h3>{title}</h3>{key}<p>{caption}</p></figcaption>'
            "{bar}"
            '<div class="plot" id="{name}" data-figure="{name}" role="group" '
            'aria-label="{title}. The numbers are in the table that follows." '
            'style="height:{height}px"></div>'
            "<details><summary>Numbers of this chart</summary>{table}</details></figure>",
            name=name,
            title=title,
            key=key,
            caption=caption,
            bar=markup('<div class="tools">{}</div>', tools) if tools else "",
            height=height,
            table=table,
        )

    def html(self) -> str:
        """Return the content of the HTML file."""
        links = (markup('<li><a href="#{}">{}</a></li>', s.id, s.title) for s in self.sections)
        script = f"\n{_asset('page.js')}\n"
        plotly, packed = _plotly()
        fields = {
            "policy": policy(script.encode(), plotly),
            "title": escape(self.title),
            "subtitle": escape(self.subtitle),
            "links": joined(links),
            "sections": joined((section.html() for section in self.sections), "\n"),
            "css": _asset("page.css"),
            "js": script,
            "dark": json.dumps(dict(DARK)),
            "figures": _packed(json.dumps(rounded(self.figures), separators=(",", ":")).encode()),
            "plotly": packed,
            "version": __version__,
        }
        return Template(_asset("page.html")).substitute(fields)


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], *, caption: str = "") -> Html:
    """Return an HTML table; cells that are numbers, also with a unit, are right-aligned."""
    if not rows:
        return Html("<p>Nothing to show.</p>")
    return markup(
        '<div class="scroll" tabindex="0" role="group" aria-label="{name}">'
        "<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>",
        name=caption or "Table",
        title=markup("<caption>{}</caption>", caption) if caption else "",
        head=joined(markup('<th scope="col">{}</th>', name) for name in headers),
        body=joined(markup("<tr>{}</tr>", joined(map(_cell, row))) for row in rows),
    )


def _cell(value: Any) -> Html:
    text = "–" if value is None else str(value)
    is_number = _NUMBER.fullmatch(text) is not None
    return markup("<td class=n>{}</td>" if is_number else "<td>{}</td>", text)


def facts(pairs: Sequence[tuple[str, str, str]]) -> Html:
    """Return key figures as HTML; each is a name, a value, and a remark such as a comparison."""
    form = "<div><dt>{}</dt><dd>{}<small>{}</small></dd></div>"
    return markup('<dl class="facts">{}</dl>', joined(markup(form, *pair) for pair in pairs))


def notices(warnings: Sequence[tuple[str, str]]) -> Html:
    """Return warnings as an HTML list; each is a problem and what to do."""
    form = "<li><strong>{}</strong> {}</li>"
    items = joined(markup(form, _text(problem), _text(todo)) for problem, todo in warnings)
    return markup('<ul class="notices">{}</ul>', items) if warnings else items


def commands(*lines: str) -> Html:
    """Return shell commands as HTML, each in its own box."""
    return joined(markup("<pre>{}</pre>", line) for line in lines)


def alarm(title: str, cause: str, todo: str, lines: Sequence[str]) -> Html:
    """Return an HTML banner: what went wrong, why, what to do, and the commands for it."""
    return markup(
        '<div class="alarm" role="alert"><strong>{}</strong><p>{}</p><p>{}</p>{}</div>',
        title,
        _text(cause),
        _text(todo),
        commands(*lines),
    )


def prose(*sentences: str) -> Html:
    """Return sentences as an HTML paragraph; empty ones are skipped."""
    text = joined((_text(sentence) for sentence in sentences if sentence), " ")
    return markup("<p>{}</p>", text) if text else text


def _text(text: str) -> Html:
    """Return a text as HTML, with text between backquotes as code."""
    return Html(re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)))


def key_of(pairs: Sequence[tuple[str, Look]], *, is_lines: bool = False) -> Html:
    """Return an HTML legend: each name beside a sample of its look, a bar or a line."""
    fill = 'data-fill="{look.colour}" data-stripe="{look.stripe}"'
    bar = f'<i {fill} data-pattern="{{look.pattern}}"></i>'
    dashed = f'<svg {fill} aria-hidden="true"><path d="M0 6H28" stroke-dasharray="{{dash}}"/></svg>'
    items = joined(
        markup(
            "<li>{}{}</li>",
            Html((dashed if is_lines else bar).format(look=look, dash=_dashes(look.dash))),
            name,
        )
        for name, look in pairs
    )
    return markup('<ul class="key">{}</ul>', items)


def _dashes(dash: str) -> str:
    return "none" if dash == "solid" else dash.replace("px", "")


def grid(*parts: str) -> Html:
    """Return charts side by side if there is room."""
    nonempty = [part for part in parts if part]
    return markup('<div class="grid">{}</div>', joined(nonempty)) if nonempty else Html()


def folded(title: str, html: str) -> Html:
    """Return HTML collapsed under a title; it is not printed on paper."""
    return markup("<details><summary>{}</summary>{}</details>", title, html)


def titled(title: str, html: str) -> Html:
    """Return HTML under its own heading within a section."""
    return markup("<h3>{}</h3>{}", title, html)


def _choice(name: str, label: str, names: Sequence[str]) -> Html:
    form = '<option value="{}">{}</option>'
    options = joined(markup(form, index, option) for index, option in enumerate(names))
    return markup('<label>{} <select data-for="{}">{}</select></label>', label, name, options)


def _zoom(name: str) -> Html:
    actions = (("in", "Zoom in"), ("out", "Zoom out"), ("left", "←"), ("right", "→"))
    names = {"left": "Move left", "right": "Move right"}
    form = '<button type="button" data-for="{}" data-do="{}" aria-label="{}">{}</button>'
    buttons = joined(
        markup(form, name, action, names.get(action, text), text)
        for action, text in (*actions, ("all", "Whole step"))
    )
    return markup('<span class="zoom">{}</span>', buttons)


def policy(*scripts: bytes) -> str:
    """Return a Content-Security-Policy that allows only these scripts and no requests.

    Inline styles are allowed, since plotly sets them.
    """
    hashes = (base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts)
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{digest}'" for digest in hashes),
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _asset(name: str) -> str:
    return resources.files("meshwright.report").joinpath(name).read_text(encoding="utf-8")


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


@cache
def _plotly() -> tuple[bytes, str]:
    """Return plotly.js (its bundle of cartesian charts), plain and packed."""
    code = _asset("plotly.min.js").encode()
    return code, _packed(code)
