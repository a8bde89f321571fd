"""The palette of the pages: distinguishable without colour vision, on paper, light and dark.

A colour has one meaning on all charts. A variant, such as gathered weights next to a rank's own,
has the same colour under a pattern. Things in one chart differ in lightness or pattern. Figures are
made in the light theme; `DARK` has the replacement of each colour in the dark theme.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

INK, SOFT, GRID, SHADE, HATCH = "#1b2330", "#5a6573", "#e4e8ed", "#f1f3f6", "#b4bcc7"
PAPER, RED = "#ffffff", "#b3261e"
# Text on what is light in both themes.
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
    """How one thing is drawn: a fill, stripes of a pattern over it, and the text on both.

    `pattern` is one of plotly's; `dash` is that of its line, as lengths of strokes and gaps.
    """

    colour: str
    pattern: str = ""
    stripe: str = PAPER
    text: str = INK
    dash: str = "solid"

    def marker(self, border: str = SOFT, width: float = 1) -> dict[str, Any]:
        """Return the marker of bars with this look."""
        line = {"color": border, "width": width}
        return {"color": self.colour, "line": line, **self._pattern("pattern")}

    def area(self) -> dict[str, Any]:
        """Return the fill of an area with this look."""
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
    """Return a colour mixed with a share of another; both as `#rrggbb`."""
    pairs = zip(_channels(colour), _channels(towards), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return red, green, blue
