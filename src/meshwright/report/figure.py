"""Shared by all pages: escaped HTML, the palette, and plotly.js figures as JSON.

`Html` is text that is already HTML; all other text is escaped when it enters a page. The palette is
distinguishable without colour vision, on paper, and in light and dark mode.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from meshwright.units import BINARY


class Html(str):
    """Text that is already HTML; adding other text escapes that text."""

    __slots__ = ()

    def __add__(self, other: str) -> Html:
        """Return the concatenation, with `other` escaped."""
        return Html(str.__add__(self, escape(other)))


def escape(value: object) -> Html:
    """Return a value as escaped HTML, or unchanged if it is `Html`.

    Escaping also covers texts that plotly interprets as HTML.
    """
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def markup(template: str, *parts: object, **named: object) -> Html:
    """Return an HTML template, in the syntax of `str.format`, filled with escaped values."""
    shown = {name: escape(value) for name, value in named.items()}
    return Html(template.format(*map(escape, parts), **shown))


def joined(parts: Iterable[object], between: str = "") -> Html:
    """Return the concatenation of escaped values, with `between`, which is HTML, between them."""
    return Html(between.join(map(escape, parts)))


INK, SOFT, GRID, SHADE, HATCH = "#1b2330", "#5a6573", "#e4e8ed", "#f1f3f6", "#b4bcc7"
PAPER, RED = "#ffffff", "#b3261e"
# Text on backgrounds that are light in both themes.
BLACK: Final = "#10151d"

_FORWARD, _BACKWARD, _INPUTS, _WEIGHTS = "#02468b", "#f09b48", "#f3de90", "#3aa273"
_FORWARD_STRIPE, _BACKWARD_STRIPE, _INPUTS_STRIPE, _WEIGHTS_STRIPE = (
    *("#011f40", "#fbdcb8", "#fdf6dc", "#a5dcc0"),
)
_OPTIMIZER, _MESSAGES, _BATCH, _COMPUTE, _HOST = (
    *("#7d56b8", "#9e244f", "#a4a537", "#48a5c7", "#9fa5ae"),
)
_PARAMETERS, _GRADIENTS, _ACTIVATIONS, _BUFFERS, _FIXED = (
    *("#7b95b0", "#d95737", "#ace08f", "#805b2c", "#585b61"),
)
_PREDICTED, _MEASURED, HELD_OUT = "#d4d8dd", "#2e3d57", "#ad4216"
_RUNS: Final = (
    *("#1351a6", "#b84b01", "#0b764d", "#813faa", "#675223", "#017e9a", "#b71532", "#282e38"),
)

DARK: Final[Mapping[str, str]] = {
    INK: "#e7ebf0",
    SOFT: "#a0abb9",
    GRID: "#2a323d",
    SHADE: "#1d242d",
    HATCH: "#4a5666",
    PAPER: "#12171d",
    RED: "#ff7a6b",
    _FORWARD: "#64a6e9",
    _BACKWARD: "#f8b05d",
    _INPUTS: "#f9e99a",
    _WEIGHTS: "#126b47",
    _FORWARD_STRIPE: "#b3d4f6",
    _BACKWARD_STRIPE: "#fde3c0",
    _INPUTS_STRIPE: "#fefae6",
    _WEIGHTS_STRIPE: "#0c3f29",
    _OPTIMIZER: "#956ed2",
    _MESSAGES: "#c13d67",
    _BATCH: "#b0b64b",
    _COMPUTE: "#6fc1dd",
    _HOST: "#7b8189",
    _PARAMETERS: "#8da8c3",
    _GRADIENTS: "#e3674e",
    _ACTIVATIONS: "#a7e193",
    _BUFFERS: "#9e7848",
    _FIXED: "#656970",
    _PREDICTED: "#45484d",
    _MEASURED: "#beccde",
    HELD_OUT: "#f1944f",
    **dict(
        zip(
            _RUNS,
            (
                *("#6ea0e8", "#ffa47a", "#7bbf9b", "#c894ee"),
                *("#af9c77", "#81cae1", "#fe8486", "#d5dae2"),
            ),
            strict=True,
        )
    ),
}


class Look(NamedTuple):
    """How a category is drawn: fill colour, stripes of a pattern over it, and text colour.

    `pattern` is one of plotly's; `dash` is the dash of its lines.
    """

    colour: str
    pattern: str = ""
    stripe: str = PAPER
    text: str = INK
    dash: str = "solid"

    def marker(self, border: str = SOFT, width: float = 1) -> dict[str, Any]:
        """Return the plotly marker of bars with this look."""
        line = {"color": border, "width": width}
        return {"color": self.colour, "line": line, **self._pattern("pattern")}

    def area(self) -> dict[str, Any]:
        """Return the plotly fill of an area with this look."""
        return {"fillcolor": self.colour, **self._pattern("fillpattern")}

    def _pattern(self, key: str) -> dict[str, Any]:
        if not self.pattern:
            return {}
        drawn = {"shape": self.pattern, "fgcolor": self.stripe, "bgcolor": self.colour}
        return {key: {**drawn, "size": 6, "solidity": 0.25}}


PREDICTED, MEASURED = Look(_PREDICTED), Look(_MEASURED)
OPTIMIZER, IDLE, WAIT = Look(_OPTIMIZER), Look(SHADE, "/", HATCH), Look(_MESSAGES)
HOST, BATCH = Look(_HOST, "+"), Look(_BATCH, "|")

# What a rank does, by the first of these that its name begins with.
ACTIONS: Final[Mapping[str, Look]] = {
    "F": Look(_FORWARD, stripe=_FORWARD_STRIPE, text=PAPER),
    "B": Look(_BACKWARD, stripe=_BACKWARD_STRIPE, text=BLACK),
    "I": Look(_INPUTS, stripe=_INPUTS_STRIPE, text=BLACK),
    "W": Look(_WEIGHTS, stripe=_WEIGHTS_STRIPE, text=INK),
}
# Every other stage of a rank that has several.
OTHER_STAGE: Final[Mapping[str, Look]] = {
    kind: look._replace(pattern="-") for kind, look in ACTIONS.items()
}
PHASES: Final[Mapping[str, Look]] = {"input": BATCH, "update": OPTIMIZER}

MEMORY_LOOKS: Final[Mapping[str, Look]] = {
    "parameters": Look(_PARAMETERS),
    "optimizer": OPTIMIZER,
    "gradients": Look(_GRADIENTS, "\\"),
    "gathered": Look(_PARAMETERS, "/"),
    "activations": Look(_ACTIVATIONS),
    "buffers": Look(_BUFFERS, "."),
    "fixed": Look(_FIXED, "x"),
}
CAUSE_LOOKS: Final[Mapping[str, Look]] = {
    "compute": Look(_COMPUTE),
    "recompute": Look(_COMPUTE, "/"),
    "tp": WAIT,
    "cp": Look(_MESSAGES, "."),
    "ep": Look(_MESSAGES, "x"),
    "data": Look(_MESSAGES, "\\"),
    "bubble": IDLE,
    "optimizer": OPTIMIZER,
    "input": BATCH,
    "host": HOST,
}

# Runs side by side, in this order.
SERIES: Final = tuple(
    Look(colour, pattern, dash=dash)
    for colour, pattern, dash in zip(
        _RUNS,
        ("", "/", "x", "-", ".", "|", "\\", "+"),
        (
            *("solid", "8px,4px", "2px,3px", "10px,3px,2px,3px"),
            *("14px,4px", "4px,2px", "14px,3px,4px,3px", "1px,2px"),
        ),
        strict=True,
    )
)
# Places in the pipeline, in both themes beneath black text.
PLACES: Final = ("#82b4e6", "#eda36b", "#79c3a0", "#c3a0dd", "#a9b2bd", "#d8bf5c")
# Tokens of an expert: none, few, many.
TOKENS: Final = (RED, SHADE, "#356f9f")


def blend(colour: str, towards: str, share: float) -> str:
    """Return a colour mixed with `share` of another; both are `#rrggbb`."""
    pairs = zip(_channels(colour), _channels(towards), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return red, green, blue


Figure = dict[str, Any]

FONT: Final = (
    'ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, '
    '"Liberation Sans", sans-serif'
)
# Points of a curve, beyond which it is thinned: more than there are pixels.
MOST_POINTS: Final = 1200


def axis(title: str = "", **options: Any) -> dict[str, Any]:
    """Return a plotly axis with the given title and a light grid; `options` override."""
    defaults: dict[str, Any] = {
        "gridcolor": GRID,
        "linecolor": GRID,
        "tickcolor": GRID,
        "ticks": "outside",
        "ticklen": 4,
        "tickfont": {"size": 11, "color": SOFT},
        "zeroline": False,
        "automargin": True,
    }
    if title:
        defaults["title"] = {"text": title, "font": {"size": 11.5, "color": SOFT}, "standoff": 8}
    return {**defaults, **options}


def figure(data: Sequence[Mapping[str, Any]], height: int, **layout: Any) -> Figure:
    """Return a plotly figure of some traces; `height` is in pixels, `layout` overrides defaults."""
    margin = {"l": 8, "r": 12, "t": 10, "b": 8, "pad": 0, **layout.pop("margin", {})}
    shared: dict[str, Any] = {
        "height": height,
        "margin": margin,
        "font": {"family": FONT, "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": {"family": FONT, "size": 12}},
    }
    return {"data": [dict(trace) for trace in data], "layout": {**shared, **layout}}


def note(text: str, x: float, y: float, colour: str = INK, **options: Any) -> dict[str, Any]:
    """Return a plotly annotation at data coordinates, unless `options` say otherwise."""
    font = {"size": 11.5, "color": colour}
    return {"text": text, "x": x, "y": y, "showarrow": False, "font": font, **options}


def end_label(text: str, y: float, colour: str, **options: Any) -> dict[str, Any]:
    """Return a plotly annotation that labels a line at its right end."""
    anchor = {"xref": "paper", "xanchor": "left", "xshift": 6, "align": "left"}
    return note(text, 1, y, colour, **{**anchor, **options})


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions in the same order, moved as little as needed to be `gap` apart.

    They stay within `low` to `high`; if they do not fit, the gap is smaller.
    """
    order = sorted(range(len(positions)), key=positions.__getitem__)
    gap = min(gap, (high - low) / max(len(positions) - 1, 1))
    moved = [0.0] * len(positions)
    floor = low
    for index in order:
        moved[index] = max(positions[index], floor)
        floor = moved[index] + gap
    roof = high
    for index in reversed(order):
        moved[index] = min(moved[index], roof)
        roof = moved[index] - gap
    return moved


def thin(values: Sequence[Any], limit: int = MOST_POINTS) -> list[Any]:
    """Return an evenly spaced selection of values, including the first and the last."""
    if len(values) <= limit:
        return list(values)
    steps = (round(step * (len(values) - 1) / (limit - 1)) for step in range(limit))
    return [values[index] for index in steps]


def rounded(value: Any, digits: int = 5) -> Any:
    """Return a JSON value with numbers rounded to `digits` digits, and None for non-finite ones."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = float(f"{value:.{digits}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    if isinstance(value, Mapping):
        return {key: rounded(inner, digits) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner, digits) for inner in value]
    return value


def time_unit(longest: float) -> tuple[str, float]:
    """Return a unit for times up to `longest` seconds, and how many of it make one second."""
    return ("s", 1.0) if longest >= 1 else ("ms", 1e3) if longest >= 1e-3 else ("µs", 1e6)


def byte_unit(largest: float) -> tuple[str, float]:
    """Return a unit for sizes up to `largest` bytes, and its size in bytes."""
    return next(((name, float(size)) for name, size in BINARY if largest >= size), ("B", 1.0))


def seconds(value: float) -> str:
    """Format a duration with three digits, as `1.23 s`, `45.6 ms` or `789 µs`."""
    if value >= 100:
        return f"{value:,.0f} s"
    unit, scale = ("s", 1.0) if value >= 1 else ("ms", 1e3) if value >= 1e-3 else ("µs", 1e6)
    return f"{value * scale:.3g} {unit}" if value else "0 s"


def finite(value: Any) -> float | None:
    """Return a value of an event as a float; None if missing, not finite or not a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def bounds(values: Iterable[float | None], *, share: float = 0.06) -> tuple[float, float]:
    """Return the range of an axis for some values, with `share` of it as margin on each side."""
    known = [value for value in values if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    air = (high - low) * share or abs(high) * share or 1.0
    return low - air, high + air
