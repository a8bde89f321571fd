"""The one palette of the pages: told apart without colour vision, on paper, light and dark.

The hues are those of Okabe and Ito (jfly.uni-koeln.de/color), darkened until they read on white.
Figures are made in the light theme; `DARK` says what the page's switch turns each colour into.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

INK, SOFT, GRID, SHADE, HATCH = "#1b2330", "#5a6573", "#e4e8ed", "#f1f3f6", "#c3cad3"
BLUE, SKY, ORANGE, AMBER = "#1f66ad", "#63aede", "#cf6a12", "#efac57"
GREEN, MINT, PURPLE, YELLOW, GREY, RED = (
    *("#127a5b", "#5fbf9c", "#8b5aa3", "#c79a16"),
    *("#8a94a1", "#b3261e"),
)

DARK: Final[Mapping[str, str]] = {
    INK: "#e7ebf0",
    SOFT: "#a0abb9",
    GRID: "#2a323d",
    SHADE: "#1d242d",
    HATCH: "#3f4a58",
    BLUE: "#5aa5ea",
    SKY: "#3a78ab",
    ORANGE: "#f2994a",
    AMBER: "#a86a24",
    GREEN: "#3fc795",
    MINT: "#2a8064",
    PURPLE: "#c193da",
    YELLOW: "#e6c24a",
    GREY: "#76818f",
    RED: "#ff7a6b",
}

PREDICTED, HAPPENED = GREY, BLUE
# Runs and layouts side by side, in this order.
SERIES: Final = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, RED, INK)

# What a rank does, by the first of these that its name begins with; the second shade is for every
# other stage of a rank that has several.
ACTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "F": (BLUE, SKY),
    "B": (ORANGE, AMBER),
    "I": (ORANGE, AMBER),
    "W": (GREEN, MINT),
}
PHASES: Final[Mapping[str, str]] = {"input": YELLOW, "update": PURPLE}
WAIT: Final = INK

MEMORY_COLOURS: Final[Mapping[str, str]] = {
    "parameters": BLUE,
    "optimizer": PURPLE,
    "gradients": ORANGE,
    "gathered": SKY,
    "activations": GREEN,
    "buffers": YELLOW,
    "fixed": GREY,
}
CAUSE_COLOURS: Final[Mapping[str, str]] = {
    "compute": BLUE,
    "recompute": SKY,
    "tp": ORANGE,
    "cp": AMBER,
    "ep": MINT,
    "data": GREEN,
    "bubble": HATCH,
    "optimizer": PURPLE,
    "input": YELLOW,
    "host": GREY,
}


def blend(colour: str, towards: str, share: float) -> str:
    """Return a colour that has a share of another in it; both as `#rrggbb`."""
    pairs = zip(_channels(colour), _channels(towards), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue
