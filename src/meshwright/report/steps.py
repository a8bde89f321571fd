"""The sections on one step of runs and simulations, with the chart of memory over the step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

from meshwright.cost.catalogue import Cluster
from meshwright.layout import Layout
from meshwright.program.profile import MEMORY, MemoryPoint, RankProfile, StepProfile
from meshwright.report.agreement import done_by
from meshwright.report.causes import causes_chart, traffic_chart
from meshwright.report.figure import (
    INK,
    MEMORY_LOOKS,
    RED,
    Figure,
    axis,
    byte_unit,
    end_label,
    escape,
    figure,
    note,
    spread,
    thin,
    time_unit,
)
from meshwright.report.page import Page, key_of, prose, table
from meshwright.report.timelines import timeline_chart, work_of
from meshwright.units import format_bytes, format_ratio

_HEIGHT: Final = 340
# Ranks that can be chosen, those with the highest peaks; a limit this much above the peak is not
# drawn, as it would press everything else to the floor.
MOST_RANKS: Final = 16
_FAR: Final = 2.5


def memory_chart(
    page: Page, happened: StepProfile | None, planned: StepProfile | None, name: str = "memory"
) -> str:
    """Return the chart of memory over the step for each rank with known memory, or "".

    The measurement is drawn as stacked areas with the prediction as a line; without a measurement,
    the prediction is stacked.
    """
    base = happened if happened and happened.worst else planned
    if base is None or base.worst is None:
        return ""
    line = planned if base is not planned else None
    ranks = sorted((r for r in base.ranks if r.memory), key=lambda r: (-_peak(r), r.rank))
    # In large worlds most ranks report their peak alone.
    shown = ([rank_profile for rank_profile in ranks if len(rank_profile.memory) > 1] or ranks)[
        :MOST_RANKS
    ]
    limit = base.memory_limit or (planned.memory_limit if planned else None)
    figures = {
        _name(rank_profile, base): memory_figure(rank_profile, _twin(rank_profile, line), limit)
        for rank_profile in shown
    }
    adjective = {"predicted": "Predicted", "simulated": "Simulated", "measured": "Measured"}[
        base.source
    ]
    caption = f"{adjective} bytes by what they are for; the rank with the highest peak comes first."
    if line is not None:
        twins = [(rank_profile, _twin(rank_profile, line)) for rank_profile in shown]
        is_alike = all(
            twin is not None and done_by(twin) == done_by(rank_profile)
            for rank_profile, twin in twins
        )
        caption += " The line is the prediction, stretched " + (
            "so that each action takes as long as it did." if is_alike else "to the measured step."
        )
    caption += _about(limit, max(_peak(rank_profile) for rank_profile in ranks))
    rows = [_row(rank_profile, _twin(rank_profile, planned), limit) for rank_profile in ranks]
    headers = ("rank", "highest at", "peak", "predicted", "of the limit", *MEMORY)
    title = f"Memory of a rank over one step, {adjective.lower()}"
    numbers = table(headers, rows, caption="Peak of each rank")
    used_kinds = {
        kind for rank_profile in shown for point in rank_profile.memory for kind in point.bytes
    }
    key = key_of([(kind, MEMORY_LOOKS[kind]) for kind in MEMORY if kind in used_kinds])
    return page.chart(name, title, figures, caption, numbers, key=key, choose="Rank")


def _about(limit: int | None, highest: int) -> str:
    """Return a sentence on a memory limit that is too high to be drawn or not known, or ""."""
    if limit is None:
        return " The device's limit is not known."
    if limit <= max(highest, 1) * _FAR:
        return ""
    times = f"{format_ratio(limit / max(highest, 1))} times the highest peak"
    return f" The device's limit, {format_bytes(limit)}, is {times}, and not drawn."


def memory_figure(rank_profile: RankProfile, twin: RankProfile | None, limit: int | None) -> Figure:
    """Return a rank's memory over the step as areas stacked in the order of `MEMORY`.

    `twin` is the predicted rank to draw as a line, `limit` the device's memory in bytes.
    """
    points = thin(rank_profile.memory if len(rank_profile.memory) > 1 else rank_profile.memory * 2)
    xs, title, length = _places(points)
    highest = max([_peak(rank_profile), _peak(twin) if twin else 0, 1])
    unit, unit_bytes = byte_unit(highest)
    is_near = limit is not None and limit <= highest * _FAR
    roof = (limit if limit is not None and is_near else highest) * 1.08 / unit_bytes
    used = [kind for kind in MEMORY if any(point.bytes.get(kind) for point in points)]
    data = [_area(kind, points, xs, unit_bytes) for kind in used]
    notes = _names(points, used, unit_bytes, roof)
    if twin is not None and twin.memory:
        data.append(_line(twin, rank_profile, points, unit_bytes, length))
    shapes = []
    if limit is not None and is_near:
        shapes.append(_level(limit / unit_bytes))
        edge = {"xref": "paper", "xanchor": "left", "yanchor": "bottom"}
        notes.append(note(f"limit {format_bytes(limit)}", 0.005, limit / unit_bytes, RED, **edge))
    return figure(
        data,
        _HEIGHT,
        hovermode="x unified",
        annotations=notes,
        shapes=shapes,
        margin={"r": 104, "t": 14, "b": 46, "l": 56},
        xaxis=axis(title, range=[0, length], showgrid=False),
        yaxis=axis(f"bytes on the rank, {unit}", range=[0, roof], fixedrange=True),
    )


def _places(points: Sequence[MemoryPoint]) -> tuple[list[float], str, float]:
    """Return the x positions of memory points, the axis title and the end of the axis.

    Positions are times or, if times are unknown, indices.
    """
    times = [point.time for point in points if point.time is not None]
    if len(times) < len(points):
        order = [float(index) for index in range(len(points))]
        return order, "moments of the step in order (times are not known)", max(order[-1], 1.0)
    first, last = min(times), max(times)
    unit, scale = time_unit(last - min(first, 0.0))
    return [time * scale for time in times], f"time since the step began, {unit}", last * scale or 1


def _area(
    kind: str, points: Sequence[MemoryPoint], xs: Sequence[float], unit_bytes: float
) -> dict[str, Any]:
    look = MEMORY_LOOKS[kind]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": kind,
        "stackgroup": "held",
        "line": {"shape": "hv", "width": 0, "color": look.colour},
        **look.area(),
        "x": list(xs),
        "y": [point.bytes.get(kind, 0) / unit_bytes for point in points],
        "text": [escape(point.at) for point in points],
        "customdata": [format_bytes(point.bytes.get(kind, 0)) for point in points],
        "hovertemplate": "%{customdata}  at %{text}",
    }


def _names(
    points: Sequence[MemoryPoint], used: Sequence[str], unit_bytes: float, roof: float
) -> list[dict[str, Any]]:
    """Return labels for the areas at the right edge, moved so that they do not overlap.

    Their heights are those at the peak, so that a kind that is freed before the end has a label
    too.
    """
    peak = max(points, key=lambda point: point.total)
    middles, below = [], 0.0
    for kind in used:
        band = peak.bytes.get(kind, 0) / unit_bytes
        middles.append(below + band / 2)
        below += band
    plot_height = _HEIGHT - 60
    places = spread(middles, roof * 15 / plot_height, roof * 0.02, roof * 0.98)
    return [end_label(kind, label_y, INK) for kind, label_y in zip(used, places, strict=True)]


def _line(
    twin: RankProfile,
    rank_profile: RankProfile,
    measured: Sequence[MemoryPoint],
    unit_bytes: float,
    length: float,
) -> dict[str, Any]:
    """Return the line of a predicted rank's memory, on the time axis of the measured rank.

    If times are unknown or the actions differ, it is stretched to the whole `length`.
    """
    points = thin(twin.memory if len(twin.memory) > 1 else twin.memory * 2)
    if any(point.time is None for point in measured):
        points = [point._replace(time=None) for point in points]
    elif done_by(twin) == done_by(rank_profile):
        times = _over(twin, rank_profile, [point.time for point in points])
        points = [p._replace(time=time) for p, time in zip(points, times, strict=True)]
    xs, _, end = _places(points)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "predicted",
        "line": {"shape": "hv", "width": 1.6, "color": INK},
        "x": [x / end * length for x in xs],
        "y": [point.total / unit_bytes for point in points],
        "text": [escape(point.at) for point in points],
        "customdata": [format_bytes(point.total) for point in points],
        "hovertemplate": "%{customdata}  at %{text}",
    }


def _over(
    twin: RankProfile, rank_profile: RankProfile, times: Sequence[float | None]
) -> list[float | None]:
    """Return times of the rank `twin` mapped to those at which `rank_profile` did the same.

    Both have the same actions. Times between the edges of actions are interpolated.
    """
    edges = [(0.0, 0.0)]
    for planned, done in zip(work_of(twin), work_of(rank_profile), strict=True):
        edges += [(planned.start, done.start), (planned.end, done.end)]
    edges.append((_end(twin), _end(rank_profile)))
    edges = sorted((max(a, 0.0), max(b, 0.0)) for a, b in edges)

    def moved(time: float) -> float:
        index = min(max(bisect_right(edges, (time, math.inf)), 1), len(edges) - 1)
        (before, done_before), (after, done_after) = edges[index - 1], edges[index]
        share = (time - before) / (after - before) if after > before else 0.0
        return done_before + share * (done_after - done_before)

    return [None if time is None else moved(time) for time in times]


def _end(rank_profile: RankProfile) -> float:
    """Return the last known time of a rank in its step, in seconds."""
    times = [point.time for point in rank_profile.memory if point.time is not None]
    return max([*times, *(span.end for span in rank_profile.spans)], default=0.0)


def _level(y: float) -> dict[str, Any]:
    line = {"color": RED, "width": 1.5, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def _twin(rank_profile: RankProfile, profile: StepProfile | None) -> RankProfile | None:
    """Return the same rank of another profile, else one of the same pipeline stage, else None."""
    with_memory = [rank for rank in profile.ranks if rank.memory] if profile else []
    same = [rank for rank in with_memory if rank.rank == rank_profile.rank]
    pp_rank = rank_profile.coordinates.get("pp", 0)
    same_pp_rank = [rank for rank in with_memory if rank.coordinates.get("pp", 0) == pp_rank]
    return next(iter([*same, *same_pp_rank]), None)


def _name(rank_profile: RankProfile, profile: StepProfile) -> str:
    pp_text = (
        f", pipeline place {rank_profile.coordinates['pp']}"
        if profile.layout.get("pp", 1) > 1
        else ""
    )
    return f"{rank_profile.rank}{pp_text}: peak {format_bytes(_peak(rank_profile))}"


def _peak(rank_profile: RankProfile) -> int:
    return rank_profile.peak.total if rank_profile.peak else 0


def _row(rank_profile: RankProfile, twin: RankProfile | None, limit: int | None) -> tuple[Any, ...]:
    peak = rank_profile.peak
    assert peak is not None
    return (
        rank_profile.rank,
        peak.at,
        format_bytes(peak.total),
        format_bytes(_peak(twin)) if twin else None,
        f"{peak.total / limit:.0%}" if limit else None,
        *(format_bytes(peak.bytes.get(kind, 0)) for kind in MEMORY),
    )


def step_sections(
    page: Page,
    planned: StepProfile | None,
    happened: StepProfile | None,
    layout: Layout | None,
    cluster: Cluster | None,
) -> None:
    """Add the sections of a step: timeline, memory, time by cause, messages; skips empty ones."""
    drawn = timeline_chart(page, [planned, happened])
    if drawn:
        step = happened.step if happened else None
        which = f"Step {step} was recorded." if step is not None else ""
        page.section("steps", "Timeline of a step", prose(which), drawn)
    page.section("memories", "Memory", memory_chart(page, happened, planned))
    page.section("time", "Step time", causes_chart(page, planned, happened))
    page.section(
        "traffic", "Communication", traffic_chart(page, planned, happened, layout, cluster)
    )
