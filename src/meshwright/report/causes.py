"""Charts of a step's time by cause and of its messages, predicted beside measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from meshwright.cost.catalogue import Cluster
from meshwright.layout import Layout
from meshwright.program.profile import CAUSES, RankProfile, StepProfile
from meshwright.report.figure import (
    MEASURED,
    PREDICTED,
    Figure,
    Look,
    axis,
    byte_unit,
    escape,
    figure,
    joined,
    seconds,
    time_unit,
)
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
    """Return the seconds of each cause in a step, averaged over the ranks that report causes."""
    causes_by_rank = (
        [rank_profile.causes for rank_profile in profile.ranks if rank_profile.causes]
        if profile
        else []
    )
    return {
        cause: sum(causes.get(cause, 0.0) for causes in causes_by_rank) / len(causes_by_rank)
        for cause in CAUSES
        if any(causes.get(cause) for causes in causes_by_rank)
    }


def bars(
    names: Sequence[str],
    sides: Sequence[tuple[str, Look, Sequence[float | None], Sequence[str]]],
    title: str,
    row: int = 40,
) -> Figure:
    """Return a horizontal bar chart: for each name a bar per side, labelled with its value.

    Each of `sides` is its name, its look, a value per name, and the values as text.
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
            "y": [index + (number - (count - 1) / 2) * width for index in range(len(names))],
            "width": width * 0.92,
            "marker": look.marker(),
            "text": list(printed),
            "textposition": "outside",
            "cliponaxis": False,
            "constraintext": "none",
            "textfont": {"size": 11},
            "customdata": [escape(bar_name) for bar_name in names],
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
            "label": max(len(line) for label in labels for line in label),
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
    """Return the chart of a step's time by cause, or "" if no cause is known.

    `happened` is the measured or simulated profile.
    """
    predicted, measured = mean_causes(planned), mean_causes(happened)
    causes = [cause for cause in CAUSES if cause in predicted or cause in measured]
    if not causes:
        return ""
    unit, scale = time_unit(max([*predicted.values(), *measured.values()]))
    source = happened.source if happened else ""
    sides = [("predicted", PREDICTED, predicted)] if predicted else []
    sides += [(source, MEASURED, measured)] if measured else []
    drawn = bars(
        [CAUSE_NAMES[cause] for cause in causes],
        [
            (
                side,
                look,
                [times.get(cause, 0.0) * scale for cause in causes],
                [_told(times, cause) for cause in causes],
            )
            for side, look, times in sides
        ],
        f"time of a step, {unit}",
    )
    rows = [
        (CAUSE_NAMES[cause], *(_told(times, cause) for _, _, times in sides)) for cause in causes
    ]
    rows.append(("step", *(seconds(sum(times.values())) for _, _, times in sides)))
    caption = "Mean of the ranks; the share is of the step."
    if source == "measured":
        caption += " Recomputation is part of compute in what is measured."
    return page.chart(
        name,
        "Step time by cause" + (f", predicted beside {source}" if predicted and measured else ""),
        drawn,
        caption,
        table(("cause", *(side for side, _, _ in sides)), rows),
        key=key_of([(side, look) for side, look, _ in sides]),
    )


def _told(times: Mapping[str, float], cause: str) -> str:
    total = sum(times.values())
    value = times.get(cause, 0.0)
    return f"{seconds(value)} ({value / total:.0%})" if total and value else "0"


def link_of(axis_name: str, layout: Layout | None, cluster: Cluster | None) -> str:
    """Return the name of the link that messages of an axis cross; "?" if it is unknown.

    It is the link between nodes if the furthest ranks of the axis are on different nodes.
    """
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
    """Return the chart of the busiest rank's messages in a step, by axis and kind, or ""."""
    base = happened if happened and _talker(happened) else planned
    busiest = _talker(base) if base else None
    if base is None or busiest is None:
        return ""
    planned_rank = _alike(busiest, planned) if base is not planned else None
    sums, expected = _sums(busiest), _sums(planned_rank) if planned_rank else {}
    keys = sorted({*sums, *expected}, key=lambda key: -sums.get(key, expected.get(key, _NONE))[0])
    largest = max([sums.get(key, _NONE)[0] for key in keys] + [1])
    unit, unit_bytes = byte_unit(largest)
    labels = [f"{axis_name} · {kind}" for axis_name, kind in keys]
    values = [sums.get(key, _NONE) for key in keys]
    drawn = bars(
        labels[:12],
        [
            (
                base.source,
                PREDICTED if base is planned else MEASURED,
                [value[0] / unit_bytes for value in values[:12]],
                [_said(value) for value in values[:12]],
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
    listed = table(headers, rows, caption=f"Messages of rank {busiest.rank} in one step")
    caption = (
        f"What rank {busiest.rank}, which sends most, sends and receives in one step: bytes, "
        "number of messages, and how long it waited for them where that is known."
    )
    return page.chart(name, "Communication by axis and kind", drawn, caption, listed)


_NONE: Final = (0, 0, None)
_Sum = tuple[int, int, float | None]
_Sums = Mapping[tuple[str, str], _Sum]


def _cells(sums: _Sums, expected: _Sums, key: tuple[str, str]) -> list[Any]:
    """Return the table cells of a kind of message: bytes, count, waiting time, predicted bytes."""
    actual = sums.get(key, _NONE)
    waited = seconds(actual[2]) if actual[2] is not None else None
    cells = [format_bytes(actual[0]), f"{actual[1]:,}", waited]
    expected_bytes = format_bytes(expected[key][0]) if key in expected else None
    return [*cells, expected_bytes] if expected else cells


def _talker(profile: StepProfile) -> RankProfile | None:
    senders = [rank_profile for rank_profile in profile.ranks if rank_profile.traffic]
    return max(
        senders,
        key=lambda rank_profile: sum(t.bytes * t.times for t in rank_profile.traffic),
        default=None,
    )


def _alike(rank_profile: RankProfile, profile: StepProfile | None) -> RankProfile | None:
    senders = [candidate for candidate in profile.ranks if candidate.traffic] if profile else []
    same = [candidate for candidate in senders if candidate.rank == rank_profile.rank]
    pp_rank = rank_profile.coordinates.get("pp", 0)
    return next(iter([*same, *(r for r in senders if r.coordinates.get("pp", 0) == pp_rank)]), None)


def _sums(rank_profile: RankProfile) -> dict[tuple[str, str], _Sum]:
    """Return the bytes, number of messages and seconds waited of a rank, by (axis, kind)."""
    sums: dict[tuple[str, str], _Sum] = {}
    for entry in rank_profile.traffic:
        byte_count, times, waited = sums.get((entry.axis, entry.kind), _NONE)
        if entry.seconds is not None:
            waited = (waited or 0.0) + entry.seconds
        sums[entry.axis, entry.kind] = (
            byte_count + entry.bytes * entry.times,
            times + entry.times,
            waited,
        )
    return sums


def _said(traffic_sum: _Sum) -> str:
    messages = "message" if traffic_sum[1] == 1 else "messages"
    return f"{format_bytes(traffic_sum[0])} in {traffic_sum[1]:,} {messages}"
