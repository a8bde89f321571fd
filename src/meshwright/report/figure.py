"""Figures of plotly.js as plain JSON: common parts, and short numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from meshwright.report.colours import GRID, INK, SOFT
from meshwright.units import BINARY

Figure = dict[str, Any]

FONT: Final = (
    'ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, '
    '"Liberation Sans", sans-serif'
)
# Points of a curve, beyond which it is thinned: more than there are pixels.
MOST_POINTS: Final = 1200


def axis(title: str = "", **options: Any) -> dict[str, Any]:
    """Return an axis: a title with its unit, a quiet grid."""
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
    """Return a figure of some traces, `height` pixels high; `layout` overrides the common one."""
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
    """Return a text in a figure, at data coordinates unless `options` say otherwise."""
    font = {"size": 11.5, "color": colour}
    return {"text": text, "x": x, "y": y, "showarrow": False, "font": font, **options}


def end_label(text: str, y: float, colour: str, **options: Any) -> dict[str, Any]:
    """Return the label of a line, right of its end."""
    anchor = {"xref": "paper", "xanchor": "left", "xshift": 6, "align": "left"}
    return note(text, 1, y, colour, **{**anchor, **options})


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions in the same order, moved as little as possible to be `gap` apart.

    They stay in `low`..`high`. If there is no room for all, they share it evenly.
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
    """Return JSON with rounded numbers, and None for non-finite ones."""
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
    """Return a readable unit for times up to `longest` seconds, and its count in one second."""
    return ("s", 1.0) if longest >= 1 else ("ms", 1e3) if longest >= 1e-3 else ("µs", 1e6)


def byte_unit(largest: float) -> tuple[str, float]:
    """Return a readable unit for sizes up to `largest` bytes, and its number of bytes."""
    return next(((name, float(size)) for name, size in BINARY if largest >= size), ("B", 1.0))


def seconds(value: float) -> str:
    """Format a duration with three digits, as `1.23 s`, `45.6 ms` or `789 µs`."""
    if value >= 100:
        return f"{value:,.0f} s"
    unit, scale = ("s", 1.0) if value >= 1 else ("ms", 1e3) if value >= 1e-3 else ("µs", 1e6)
    return f"{value * scale:.3g} {unit}" if value else "0 s"


def finite(value: Any) -> float | None:
    """Return a number of an event, or None if it is missing, not finite or no number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def bounds(values: Iterable[float | None], *, share: float = 0.06) -> tuple[float, float]:
    """Return the range of an axis for some values, with a small margin."""
    known = [value for value in values if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    air = (high - low) * share or abs(high) * share or 1.0
    return low - air, high + air
