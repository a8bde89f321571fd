"""Where a step's time goes, and its messages: predicted next to measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from meshwright.cost.catalogue import Cluster
from meshwright.layout import Layout
from meshwright.program.profile import CAUSES, RankProfile, StepProfile
from meshwright.report.colours import MEASURED, PREDICTED, Look
from meshwright.report.figure import Figure, axis, byte_unit, figure, seconds, time_unit
from meshwright.report.markup import escape, joined
from meshwright.report.page import Page, key_of, table
from meshwright.units import format_bytes

CAUSE_NAMES: Final[Mapping[str, str]] = {
    "compute": "compute",
    "recompute": "recompute",
    "tp": "wait: tensor parallel",
    "cp": "wait: context parallel",
    "ep": "wait: expert parallel",
    "data": "wait: data parallel",
    "bubble": "bubble",
    "optimizer": "optimizer",
    "input": "wait for the batch",
    "host": "rest, on the host",
}
# Letters of a label, beyond which it is broken into lines.
_LABEL: Final = 24
# The axes of the mesh that the axis of a message joins, as `program.collectives` has them.
_JOINED: Final[Mapping[str, tuple[str, ...]]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "ends": ("pp",),
    "ep": ("dp_replicate", "dp_shard", "cp"),
    "expert_shard": ("dp_shard", "cp"),
    "expert_replicate": ("dp_replicate", "cp"),
    "shard": ("dp_shard", "cp"),
    "replicate": ("dp_replicate",),
    "data": ("dp_replicate", "dp_shard", "cp"),
    "world": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
}


def mean_causes(profile: StepProfile | None) -> dict[str, float]:
    """Return the seconds of each cause, as the mean over ranks with known causes."""
    known = [one.causes for one in profile.ranks if one.causes] if profile else []
    return {
        cause: sum(each.get(cause, 0.0) for each in known) / len(known)
        for cause in CAUSES
        if any(each.get(cause) for each in known)
    }


def bars(
    names: Sequence[str],
    sides: Sequence[tuple[str, Look, Sequence[float | None], Sequence[str]]],
    title: str,
    row: int = 40,
) -> Figure:
    """Return bars next to each other by name, each with its value at the end.

    `sides` are tuples of a name, a look, the values and their format.
    """
    count = len(sides)
    known = [value for _, _, values, _ in sides for value in values if value is not None]
    highest = max(known, default=1.0) or 1.0
    width = 0.72 / count
    labels = [textwrap.wrap(name, _LABEL, break_long_words=False) or [""] for name in names]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": escape(name),
            "x": list(values),
            "y": [at + (number - (count - 1) / 2) * width for at in range(len(names))],
            "width": width * 0.92,
            "marker": look.marker(),
            "text": list(printed),
            "textposition": "outside",
            "cliponaxis": False,
            "constraintext": "none",
            "textfont": {"size": 11},
            "customdata": [escape(one) for one in names],
            "hovertemplate": f"%{{customdata}}<br>{escape(name)}: %{{text}}<extra></extra>",
        }
        for number, (name, look, values, printed) in enumerate(sides)
    ]
    return figure(
        data,
        max(row, 15 * max(len(label) for label in labels) + 8) * len(names) + 56,
        barmode="overlay",
        margin={"b": 44, "r": 10},
        # The page makes room for the values at the ends of bars, by its width: see page.js.
        meta={
            "highest": highest,
            "value": max(len(text) for _, _, _, printed in sides for text in printed),
            "label": max(len(part) for label in labels for part in label),
        },
        xaxis=axis(title, range=[0, highest * 1.3], fixedrange=True),
        yaxis=axis(
            range=[len(names) - 0.5, -0.5],
            tickvals=list(range(len(names))),
            ticktext=[joined(label, "<br>") for label in labels],
            showgrid=False,
            fixedrange=True,
            ticks="",
        ),
    )


def causes_chart(
    page: Page, planned: StepProfile | None, happened: StepProfile | None, name: str = "causes"
) -> str:
    """Return the chart of the step's time by cause; empty if none is known."""
    ours, theirs = mean_causes(planned), mean_causes(happened)
    causes = [cause for cause in CAUSES if cause in ours or cause in theirs]
    if not causes:
        return ""
    unit, scale = time_unit(max([*ours.values(), *theirs.values()]))
    word = happened.source if happened else ""
    sides = [("predicted", PREDICTED, ours)] if ours else []
    sides += [(word, MEASURED, theirs)] if theirs else []
    drawn = bars(
        [CAUSE_NAMES[cause] for cause in causes],
        [
            (
                each,
                look,
                [found.get(cause, 0.0) * scale for cause in causes],
                [_told(found, cause) for cause in causes],
            )
            for each, look, found in sides
        ],
        f"time of a step, {unit}",
    )
    rows = [
        (CAUSE_NAMES[cause], *(_told(found, cause) for _, _, found in sides)) for cause in causes
    ]
    rows.append(("step", *(seconds(sum(found.values())) for _, _, found in sides)))
    told = "Mean of the ranks; the share is of the step."
    if word == "measured":
        told += " Recomputation is part of compute in what is measured."
    return page.chart(
        name,
        "Step time by cause" + (f", predicted beside {word}" if ours and theirs else ""),
        drawn,
        told,
        table(("cause", *(each for each, _, _ in sides)), rows),
        key=key_of([(each, look) for each, look, _ in sides]),
    )


def _told(found: Mapping[str, float], cause: str) -> str:
    total = sum(found.values())
    value = found.get(cause, 0.0)
    return f"{seconds(value)} ({value / total:.0%})" if total and value else "0"


def link_of(axis_name: str, layout: Layout | None, cluster: Cluster | None) -> str:
    """Return the link that the messages of an axis cross: within a node, or between nodes."""
    if layout is None or cluster is None or axis_name not in _JOINED:
        return "?"
    furthest = max(layout.mesh.group(0, _JOINED[axis_name]))
    if axis_name == "ep":  # neighbours among these, and maybe ranks of tp
        furthest = (layout.ep - 1) * layout.expert_tp
    crosses = furthest >= cluster.per_node
    return cluster.outer.name if crosses else cluster.inner.name


def traffic_chart(
    page: Page,
    planned: StepProfile | None,
    happened: StepProfile | None,
    layout: Layout | None,
    cluster: Cluster | None,
    name: str = "messages",
) -> str:
    """Return the busiest rank's messages in a step, by axis, kind and link; or nothing."""
    base = happened if happened and _talker(happened) else planned
    one = _talker(base) if base else None
    if base is None or one is None:
        return ""
    other = _alike(one, planned) if base is not planned else None
    sums, expected = _sums(one), _sums(other) if other else {}
    keys = sorted({*sums, *expected}, key=lambda key: -sums.get(key, expected.get(key, _NONE))[0])
    largest = max([sums.get(key, _NONE)[0] for key in keys] + [1])
    unit, size = byte_unit(largest)
    labels = [f"{axis_name} · {kind}" for axis_name, kind in keys]
    found = [sums.get(key, _NONE) for key in keys]
    drawn = bars(
        labels[:12],
        [
            (
                base.source,
                PREDICTED if base is planned else MEASURED,
                [each[0] / size for each in found[:12]],
                [_said(each) for each in found[:12]],
            )
        ],
        f"bytes in a step, {unit}",
        row=30,
    )
    rows = [
        (axis_name, kind, link_of(axis_name, layout, cluster), *_cells(sums, expected, key))
        for key in keys
        for axis_name, kind in (key,)
    ]
    headers = ["axis", "kind", "link", "bytes", "messages", "waited"]
    headers += ["predicted bytes"] if expected else []
    listed = table(headers, rows, caption=f"Messages of rank {one.rank} in one step")
    told = (
        f"What rank {one.rank}, which sends most, sends and receives in one step: bytes, number of "
        "messages, and how long it waited for them where that is known."
    )
    return page.chart(name, "Communication by axis and kind", drawn, told, listed)


_NONE: Final = (0, 0, None)
_Sum = tuple[int, int, float | None]
_Sums = Mapping[tuple[str, str], _Sum]


def _cells(sums: _Sums, expected: _Sums, key: tuple[str, str]) -> list[Any]:
    """Return what a table says of a kind of message: bytes, number, waited, predicted bytes."""
    found = sums.get(key, _NONE)
    waited = seconds(found[2]) if found[2] is not None else None
    cells = [format_bytes(found[0]), f"{found[1]:,}", waited]
    theirs = format_bytes(expected[key][0]) if key in expected else None
    return [*cells, theirs] if expected else cells


def _talker(profile: StepProfile) -> RankProfile | None:
    known = [one for one in profile.ranks if one.traffic]
    return max(known, key=lambda one: sum(t.bytes * t.times for t in one.traffic), default=None)


def _alike(one: RankProfile, profile: StepProfile | None) -> RankProfile | None:
    known = [other for other in profile.ranks if other.traffic] if profile else []
    same = [other for other in known if other.rank == one.rank]
    place = one.coordinates.get("pp", 0)
    return next(iter([*same, *(r for r in known if r.coordinates.get("pp", 0) == place)]), None)


def _sums(one: RankProfile) -> dict[tuple[str, str], _Sum]:
    """Return bytes, messages and seconds waited of a rank by axis and kind."""
    found: dict[tuple[str, str], _Sum] = {}
    for each in one.traffic:
        held, times, waited = found.get((each.axis, each.kind), _NONE)
        if each.seconds is not None:
            waited = (waited or 0.0) + each.seconds
        found[each.axis, each.kind] = (held + each.bytes * each.times, times + each.times, waited)
    return found


def _said(found: _Sum) -> str:
    messages = "message" if found[1] == 1 else "messages"
    return f"{format_bytes(found[0])} in {found[1]:,} {messages}"
