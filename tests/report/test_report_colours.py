"""Colours of the pages: text on bars can be read, and things in one chart are told apart."""

from itertools import combinations

import pytest

from meshwright.report import figure
from meshwright.report.figure import (
    ACTIONS,
    BLACK,
    CAUSE_LOOKS,
    DARK,
    HELD_OUT,
    INK,
    MEASURED,
    MEMORY_LOOKS,
    OTHER_STAGE,
    PAPER,
    PHASES,
    PLACES,
    PREDICTED,
    RED,
    SERIES,
    SOFT,
    WAIT,
    blend,
)

THEMES = {"light": lambda colour: colour, "dark": lambda colour: DARK.get(colour, colour)}
# What is drawn in one chart.
CHARTS = {
    "timeline": [*ACTIONS.values(), *OTHER_STAGE.values(), *PHASES.values(), WAIT, figure.IDLE],
    "memory": list(MEMORY_LOOKS.values()),
    "causes": list(CAUSE_LOOKS.values()),
    "sides": [PREDICTED, MEASURED],
    "runs": list(SERIES),
}
# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB; of grey paper see `seen`.
SIGHT = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
    "grey": ((0.2126, 0.7152, 0.0722),) * 3,
}


def linear(colour):
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]


def contrast(one, other):
    """Return the contrast ratio of WCAG 2.2."""
    weights = (0.2126, 0.7152, 0.0722)
    low, high = sorted(
        sum(w * x for w, x in zip(weights, linear(c), strict=True)) for c in (one, other)
    )
    return (high + 0.05) / (low + 0.05)


def seen(colour, matrix):
    """Return a colour's place in OKLab (bottosson.github.io/posts/oklab) as an eye sees it."""
    red, green, blue = (
        max(sum(m * x for m, x in zip(row, linear(colour), strict=True)), 0.0) for row in matrix
    )
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def apart(one, other, matrix):
    places = zip(seen(one, matrix), seen(other, matrix), strict=True)
    return sum((a - b) ** 2 for a, b in places) ** 0.5


@pytest.mark.parametrize("theme", THEMES)
def test_text_on_bars_can_be_read(theme):
    shown = THEMES[theme]
    for kind in ACTIONS:
        for look in (ACTIONS[kind], OTHER_STAGE[kind]):
            under = [look.colour, *([look.stripe] if look.pattern else [])]
            for colour in under:
                assert contrast(shown(look.text), shown(colour)) >= 4.5, (kind, colour)
    for share in (0.0, 0.3, 0.7):
        for place in PLACES:
            assert contrast(BLACK, blend(place, PAPER, share)) >= 4.5
    for text in (INK, SOFT, RED, HELD_OUT):  # and on the page
        assert contrast(shown(text), shown(PAPER)) >= 4.5, text


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("chart", CHARTS)
def test_what_lies_in_one_chart_is_told_apart(chart, sight, theme):
    """By its pattern, or by a difference that is plain beside each other, on grey paper, too."""
    shown = THEMES[theme]
    for one, other in combinations(CHARTS[chart], 2):
        if one.pattern == other.pattern:
            far = apart(shown(one.colour), shown(other.colour), SIGHT[sight])
            assert far >= 0.05, (one, other)


def test_a_colour_has_one_meaning():
    """Charts share a look where they mean the same; variants of a thing share its colour."""
    variants = [{"parameters", "gathered"}, {"compute", "recompute"}, {"tp", "cp", "ep", "data"}]
    named = {**MEMORY_LOOKS, **CAUSE_LOOKS, **{f"action {k}": v for k, v in ACTIONS.items()}}
    named |= {"predicted": PREDICTED, "measured": MEASURED}
    named |= {f"run {at}": look for at, look in enumerate(SERIES)}
    for (name, one), (other_name, other) in combinations(named.items(), 2):
        if one.colour == other.colour:
            assert any({name, other_name} <= each for each in variants), (name, other_name)
            assert one.pattern != other.pattern
    bars = [look.colour for name, look in named.items() if not name.startswith("run")]
    for theme in THEMES.values():
        for one, other in combinations(sorted(set(bars)), 2):
            assert apart(theme(one), theme(other), SIGHT["full"]) >= 0.05, (one, other)


def test_every_colour_has_a_dark_one():
    looks = [look for chart in CHARTS.values() for look in chart]
    used = {part for look in looks for part in (look.colour, look.stripe)}
    assert used <= set(DARK)
    assert len(set(DARK.values())) == len(DARK)
