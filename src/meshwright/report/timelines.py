"""The pipeline's timeline: planned above measured, on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from meshwright.program.profile import RankProfile, Span, StepProfile
from meshwright.report.colours import (
    ACTIONS,
    HOST,
    IDLE,
    INK,
    OTHER_STAGE,
    PHASES,
    SOFT,
    WAIT,
    Look,
)
from meshwright.report.figure import Figure, axis, figure, note, seconds, time_unit
from meshwright.report.markup import escape
from meshwright.report.page import Page, folded, key_of, table
from meshwright.units import format_bytes

# Spans of one picture: a browser draws that many in well under a second.
MOST_SPANS: Final = 5000
_ROW, _GAP, _TITLE = 30, 26, 24
NAMES: Final = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
    "input": "wait for the batch",
    "reduce": "sum gradients",
    "update": "optimizer",
}
TITLES: Final = {"predicted": "Planned", "simulated": "Simulated", "measured": "Measured"}


class Panel(NamedTuple):
    """One profile of a timeline, with the ranks that are drawn of it."""

    profile: StepProfile
    ranks: tuple[RankProfile, ...]


def panels(profiles: Sequence[StepProfile | None]) -> list[Panel]:
    """Return the profiles that have spans, each with one rank for each place in the pipeline."""
    found = []
    for one in profiles:
        with_spans = [rank for rank in one.ranks if rank.spans] if one else []
        if one is None or not with_spans:
            continue
        if (one.layout.get("pp") or 1) > 1:
            places: dict[int, RankProfile] = {}
            for rank in with_spans:
                places.setdefault(rank.coordinates.get("pp", 0), rank)
            with_spans = [places[place] for place in sorted(places)]
        room = MOST_SPANS
        kept: list[RankProfile] = []
        for rank in with_spans:
            room -= len(rank.spans)
            if kept and room < 0:
                break
            kept.append(rank)
        found.append(Panel(one, tuple(kept)))
    return found


def timeline(shown: Sequence[Panel], longest: float = 0.0) -> Figure:
    """Return the picture of some panels, one below the other, over `longest` seconds at least."""
    heights = [_ROW * len(panel.ranks) + _TITLE for panel in shown]
    total = sum(heights) + _GAP * (len(shown) - 1)
    longest = max(longest, *(_end(panel) for panel in shown))
    unit, scale = time_unit(longest)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    notes, shapes = [], []
    top = total
    for number, (panel, height) in enumerate(zip(shown, heights, strict=True)):
        suffix = str(number + 1) if number else ""
        domain = [(top - height) / total, (top - _TITLE) / total]
        top -= height + _GAP
        layout[f"yaxis{suffix}"] = axis(
            domain=[max(domain[0], 0.0), domain[1]],
            range=[len(panel.ranks) - 0.45, -0.55],
            tickvals=list(range(len(panel.ranks))),
            ticktext=[_row_name(one, panel.profile) for one in panel.ranks],
            fixedrange=True,
            showgrid=False,
            ticks="",
            tickfont={"size": 11.5},
        )
        notes.append(_heading(panel, domain[1], total))
        data += _traces(panel, f"y{suffix}", scale, unit)
        if panel.profile.step_time_s:
            shapes.append(_end_of_step(panel.profile.step_time_s * scale, suffix, domain))
    layout["xaxis"] = axis(
        f"time since the step began, {unit}",
        range=[0, longest * scale],
        anchor=f"y{len(shown) if len(shown) > 1 else ''}",
        minallowed=0,
        maxallowed=longest * scale,
    )
    return figure(
        data,
        total + 58,
        annotations=notes,
        shapes=shapes,
        barmode="overlay",
        bargap=0,
        uniformtext={"minsize": 9, "mode": "hide"},
        margin={"t": 4, "b": 46, "l": 96, "r": 14},
        **layout,
    )


def _end(panel: Panel) -> float:
    last = max(span.end for one in panel.ranks for span in one.spans)
    return max(last, panel.profile.step_time_s or 0.0)


def _row_name(one: RankProfile, profile: StepProfile) -> str:
    if not 0 < len(one.stages) <= 3 or (profile.layout.get("pp") or 1) == 1:
        return f"rank {one.rank}"
    return f"rank {one.rank} · s{','.join(map(str, one.stages))}"


def _heading(panel: Panel, y: float, total: int) -> dict[str, Any]:
    profile = panel.profile
    words = [f"<b>{TITLES[profile.source]}</b>"]
    if profile.step_time_s:
        words.append(f"step {seconds(profile.step_time_s)}")
    if profile.idle is not None:
        words.append(f"idle {profile.idle:.1%}")
    place = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    return note("   ".join(words), 0, y + 1 / total, **place)


def _end_of_step(at: float, suffix: str, domain: Sequence[float]) -> dict[str, Any]:
    line = {"color": SOFT, "width": 1, "dash": "dot"}
    place = {"xref": "x", "yref": "paper", "y0": max(domain[0], 0.0), "y1": domain[1]}
    return {"type": "line", "x0": at, "x1": at, "line": line, "layer": "below", **place}


def _traces(panel: Panel, y: str, scale: float, unit: str) -> list[dict[str, Any]]:
    """Return the bars of a panel: idle time below, work over it, waits at the foot of each row."""
    found = _idle(panel, y, scale, unit)
    groups: dict[tuple[str, Look, bool], list[tuple[int, Span]]] = {}
    for row, one in enumerate(panel.ranks):
        for span in one.spans:
            is_wait = span.track == "messages"
            name = "wait" if is_wait else span.name
            groups.setdefault((name, _look(span, one), is_wait), []).append((row, span))
    for (name, look, is_wait), spans in sorted(groups.items(), key=lambda each: each[0][2]):
        is_action = name in ACTIONS and not is_wait
        trace: dict[str, Any] = {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "yaxis": y,
            "base": [span.start * scale for _, span in spans],
            "x": [max(span.seconds, 0.0) * scale for _, span in spans],
            "y": [row + (0.4 if is_wait else -0.05) for row, _ in spans],
            "width": 0.12 if is_wait else 0.74,
            "marker": look.marker(INK, 0.5 if is_action else 0),
            "hovertext": [_hover(span, panel.ranks[row], scale, unit) for row, span in spans],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
        if is_action:
            trace["text"] = [str(span.microbatch) for _, span in spans]
            trace |= {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
            font = {"size": 10, "color": look.text}
            trace |= {"constraintext": "inside", "insidetextfont": font}
        found.append(trace)
    return found


def _idle(panel: Panel, y: str, scale: float, unit: str) -> list[dict[str, Any]]:
    """Return the stretches between a row's actions, from the first of all to the last."""
    if panel.profile.idle is None:
        return []
    work = [_work(one) for one in panel.ranks]
    first = min(span.start for spans in work for span in spans)
    last = max(span.end for spans in work for span in spans)
    gaps = []
    for row, spans in enumerate(work):
        edges = [(first, first), *((span.start, span.end) for span in spans), (last, last)]
        for (_, end), (start, _) in pairwise(edges):
            if start - end > (last - first) * 1e-4:
                gaps.append((row, end, start))
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": "idle",
            "yaxis": y,
            "base": [start * scale for _, start, _ in gaps],
            "x": [(end - start) * scale for _, start, end in gaps],
            "y": [row - 0.05 for row, _, _ in gaps],
            "width": 0.74,
            "marker": IDLE.marker(width=0),
            "hovertext": [
                f"rank {panel.ranks[row].rank} is idle for {seconds(end - start)} (bubble)"
                for row, start, end in gaps
            ],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
    ]


def _work(one: RankProfile) -> list[Span]:
    return sorted((span for span in one.spans if span.track == "compute"), key=lambda s: s.start)


def _look(span: Span, one: RankProfile) -> Look:
    if span.track == "messages":
        return WAIT
    if span.name in ACTIONS:
        place = one.stages.index(span.stage) if span.stage in one.stages else 0
        return (OTHER_STAGE if place % 2 else ACTIONS)[span.name]
    return PHASES.get(span.name, HOST)


def _hover(span: Span, one: RankProfile, scale: float, unit: str) -> str:
    if span.track == "messages":
        where = f" along {escape(span.axis)}" if span.axis else ""
        size = f", {format_bytes(span.bytes)}" if span.bytes else ""
        what = f"waits: {escape(span.name)}{where}{size}"
    else:
        what = NAMES.get(span.name, escape(span.name))
    if span.name in ACTIONS:
        what = f"<b>{span.name} {what}</b>"
    if span.stage >= 0:
        what += f"<br>stage {span.stage}"
    if span.microbatch >= 0:
        what += f", microbatch {span.microbatch}"
    times = f"{span.start * scale:.4g} to {span.end * scale:.4g} {unit}"
    return f"{what}<br>rank {one.rank}: {seconds(span.seconds)}, {times}"


def timeline_chart(
    page: Page,
    profiles: Sequence[StepProfile | None],
    name: str = "timeline",
    longest: float = 0.0,
) -> str:
    """Return the chart of the profiles that have spans; empty where none has."""
    shown = panels(profiles)
    if not shown:
        return ""
    used = {span.name for panel in shown for one in panel.ranks for span in one.spans}
    has_waits = any(s.track == "messages" for p in shown for one in p.ranks for s in one.spans)
    pairs = [(f"{kind} {NAMES[kind]}", ACTIONS[kind]) for kind in ACTIONS if kind in used]
    two = any(len(one.stages) > 1 for panel in shown for one in panel.ranks)
    pairs += [("a rank's other stage", OTHER_STAGE["F"])] if two else []
    pairs += [(NAMES[kind], PHASES[kind]) for kind in PHASES if kind in used]
    others = sorted(
        {s.name for p in shown for o in p.ranks for s in o.spans if s.track == "host"} - set(PHASES)
    )
    pairs += [(", ".join(NAMES.get(kind, kind) for kind in others), HOST)] if others else []
    pairs += [("waits for a message", WAIT)] if has_waits else []
    pairs += [("idle: the bubble", IDLE)] if any(p.profile.idle is not None for p in shown) else []
    told = (
        "Each bar is an action, with the number of its microbatch. Drag over a stretch to zoom in."
    )
    cut = [p for p in shown if len(p.ranks) < len([o for o in p.profile.ranks if o.spans])]
    if cut:
        told += " One rank stands for others that do the same."
    title = "Timeline of one step"
    if len(shown) > 1:
        title += ": " + " above ".join(TITLES[panel.profile.source].lower() for panel in shown)
    rows = [
        (TITLES[panel.profile.source], one.rank, _order(one))
        for panel in shown
        for one in panel.ranks
    ]
    numbers = table(("", "rank", "actions in order"), rows, caption="Order of actions")
    numbers += folded("Begin and end of each action", _every(shown))
    return page.chart(
        name, title, timeline(shown, longest), told, numbers, key=key_of(pairs), zoom=True
    )


def _order(one: RankProfile) -> str:
    words = [
        f"{span.stage}{span.name}{span.microbatch}" if span.name in ACTIONS else span.name
        for span in sorted(one.spans, key=lambda s: s.start)
        if span.track != "messages"
    ]
    shown = words[:60]
    return " ".join(shown) + (f" … {len(words) - 60} more" if len(words) > 60 else "")


def _every(shown: Sequence[Panel], most: int = 300) -> str:
    rows = [
        (
            TITLES[panel.profile.source],
            one.rank,
            f"{span.stage}{span.name}{span.microbatch}" if span.name in ACTIONS else span.name,
            seconds(span.start),
            seconds(span.end),
        )
        for panel in shown
        for one in panel.ranks
        for span in sorted(one.spans, key=lambda s: s.start)
    ]
    cut = f"The first {most} of {len(rows)} spans" if len(rows) > most else "All spans"
    return table(("", "rank", "what", "begins", "ends"), rows[:most], caption=cut)
