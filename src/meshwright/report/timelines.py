"""The timeline of a pipeline's step: planned above measured, on one time axis.

A panel is one profile; a long step has its middle folded; a place maps the start and end of a span
to the axis.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from meshwright.program.profile import RankProfile, Span, StepProfile
from meshwright.report.agreement import done_by
from meshwright.report.figure import (
    ACTIONS,
    HOST,
    IDLE,
    INK,
    OTHER_STAGE,
    PAPER,
    PHASES,
    SOFT,
    WAIT,
    Figure,
    Look,
    axis,
    escape,
    figure,
    note,
    seconds,
    time_unit,
)
from meshwright.report.page import Page, folded, key_of, table
from meshwright.units import format_bytes

# Spans of one profile that are drawn without a fold: a browser draws them in well under a second.
MOST_SPANS: Final = 5000
# Spans that go with an action, in a picture that is to have no more than that: it and its messages.
_SPANS_OF_ACTION: Final = 3
# The fold's share of the picture.
_WIDTH: Final = 0.04
# Where a stretch of time is drawn; None where it isn't.
Place = Callable[[float, float], tuple[float, float] | None]


class Panel(NamedTuple):
    """One profile of a timeline, with the ranks to draw."""

    profile: StepProfile
    ranks: tuple[RankProfile, ...]

    @property
    def end(self) -> float:
        """The end of its last span or of the step, whichever is later, in seconds."""
        last = max(span.end for rank_profile in self.ranks for span in rank_profile.spans)
        return max(last, self.profile.step_time_s or 0.0)


class Fold(NamedTuple):
    """A part of a step, `start` to `stop` in seconds, that is drawn only `width` seconds wide."""

    start: float
    stop: float
    width: float

    def at(self, time: float) -> float:
        """Return where a time is drawn; times within the fold are drawn at its left edge."""
        is_after = time >= self.stop
        return time - self.stop + self.start + self.width if is_after else min(time, self.start)

    def place(self, start: float, end: float) -> tuple[float, float] | None:
        """Return where an interval is drawn; None if it is entirely within the fold."""
        if self.start <= start and end <= self.stop:
            return None
        begins = self.at(max(start, self.stop)) if start >= self.start else start
        return begins, max(begins, self.at(end))


def as_timed(start: float, end: float) -> tuple[float, float]:
    """Return an interval unchanged, for a timeline without a fold."""
    return start, end


def work_of(rank_profile: RankProfile) -> list[Span]:
    """Return the spans of a rank's actions, in order of time."""
    return sorted(
        (span for span in rank_profile.spans if span.track == "compute"),
        key=lambda span: span.start,
    )


def fold_of(panels: Sequence[Panel]) -> Fold | None:
    """Return the middle of a step to fold if there are too many spans to draw, else None.

    The first and last actions of each rank, which fill and drain the pipeline, remain.
    """
    edges = [
        _middle(panel)
        for panel in panels
        if sum(len(rank_profile.spans) for rank_profile in panel.ranks) > MOST_SPANS
    ]
    if not edges:
        return None
    start, stop = max(first for first, _ in edges), min(last for _, last in edges)
    if stop <= start:
        return None
    shown = start + max(panel.end for panel in panels) - stop
    return Fold(start, stop, _WIDTH * shown)


def _middle(panel: Panel) -> tuple[float, float]:
    """Return when all ranks have done their first actions, and when one begins its last ones."""
    stages = max(len(rank_profile.stages) for rank_profile in panel.ranks) * len(panel.ranks)
    fitting = MOST_SPANS // (2 * _SPANS_OF_ACTION * len(panel.ranks))
    end_actions = min(2 * stages + 4, max(fitting, 1))
    work = [
        actions
        for rank_profile in panel.ranks
        if len(actions := work_of(rank_profile)) > 2 * end_actions
    ]
    if not work:
        return panel.end, 0.0
    return max(actions[end_actions - 1].end for actions in work), min(
        actions[-end_actions].start for actions in work
    )


def aligned(panels: Sequence[Panel]) -> list[list[Place]] | None:
    """Return, for each row, a mapping of times at which equal actions of all panels are aligned.

    An action is as wide as the longest time in any panel from its start to that of the next. None
    if there are fewer than two panels, or if their rows differ in actions.
    """
    groups: dict[int, list[RankProfile]] = defaultdict(list)
    for panel in panels:
        for rank_profile in panel.ranks:
            groups[rank_profile.coordinates.get("pp", 0)].append(rank_profile)
    is_alike = all(
        done_by(rank_profile) == done_by(group[0])
        for group in groups.values()
        for rank_profile in group
    )
    if len(panels) < 2 or not is_alike or not all(done_by(group[0]) for group in groups.values()):
        return None
    slots = {pp_rank: _slots(group) for pp_rank, group in groups.items()}
    return [
        [
            _by_action(rank_profile, slots[rank_profile.coordinates.get("pp", 0)])
            for rank_profile in panel.ranks
        ]
        for panel in panels
    ]


def _slots(rank_profiles: Sequence[RankProfile]) -> list[float]:
    """Return where each action begins when rows with the same actions are aligned."""
    starts = [[span.start for span in work_of(rank_profile)] for rank_profile in rank_profiles]
    slots = [max(row_starts[0] for row_starts in starts)]
    pitches = ([after - before for before, after in pairwise(row_starts)] for row_starts in starts)
    for longest in map(max, zip(*pitches, strict=True)):
        slots.append(slots[-1] + longest)
    return slots


def _by_action(rank_profile: RankProfile, slots: Sequence[float]) -> Place:
    starts = [span.start for span in work_of(rank_profile)]

    def place(start: float, end: float) -> tuple[float, float]:
        index = max(bisect_right(starts, start) - 1, 0)
        begins = slots[index] + start - starts[index]
        return begins, begins + end - start

    return place


# Ranks of one picture: all places of a pipeline, and of ranks that do the same some.
_MOST_PLACES, _MOST_ALIKE = 64, 16
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


class _Row(NamedTuple):
    """A rank of a figure, and the mapping of its spans to the time axis."""

    rank_profile: RankProfile
    place: Place


def panels(profiles: Sequence[StepProfile | None]) -> list[Panel]:
    """Return a panel for each profile with spans, with one rank per pipeline stage."""
    drawn = []
    for profile in profiles:
        with_spans = [rank for rank in profile.ranks if rank.spans] if profile else []
        if profile is None or not with_spans:
            continue
        limit = _MOST_ALIKE
        if (profile.layout.get("pp") or 1) > 1:
            first_by_pp_rank: dict[int, RankProfile] = {}
            for rank in with_spans:
                first_by_pp_rank.setdefault(rank.coordinates.get("pp", 0), rank)
            with_spans, limit = (
                [first_by_pp_rank[pp_rank] for pp_rank in sorted(first_by_pp_rank)],
                _MOST_PLACES,
            )
        drawn.append(Panel(profile, tuple(with_spans[:limit])))
    return drawn


def timelines(shown: Sequence[Panel], longest: float = 0.0) -> dict[str, Figure]:
    """Return figures by name: "in time" and, if the panels are comparable, with actions aligned.

    The first spans at least `longest` seconds.
    """
    longest = max(longest, *(panel.end for panel in shown))
    fold = fold_of(shown)
    places: list[list[Place]]
    if fold is not None:
        places = [[fold.place] * len(panel.ranks) for panel in shown]
        longest = fold.at(max(panel.end for panel in shown))
    else:
        places = [[as_timed] * len(panel.ranks) for panel in shown]
    figures = {"in time": _picture(shown, places, longest, fold=fold)}
    by_action = aligned(shown) if fold is None else None
    if by_action is not None:
        intervals = [
            place(span.start, span.end)
            for panel, row_places in zip(shown, by_action, strict=True)
            for rank_profile, place in zip(panel.ranks, row_places, strict=True)
            for span in rank_profile.spans
        ]
        last = max(end for _, end in (interval for interval in intervals if interval is not None))
        figures["the same actions aligned"] = _picture(shown, by_action, last, is_aligned=True)
    return figures


def _picture(
    shown: Sequence[Panel],
    places: Sequence[Sequence[Place]],
    longest: float,
    *,
    fold: Fold | None = None,
    is_aligned: bool = False,
) -> Figure:
    """Return a figure with the panels one below the other, on one axis of `longest` seconds.

    `places` has the mapping to the axis for each row of each panel.
    """
    heights = [_ROW * len(panel.ranks) + _TITLE for panel in shown]
    total = sum(heights) + _GAP * (len(shown) - 1)
    unit, scale = time_unit(longest)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    notes, shapes = [], []
    top = total
    for number, (panel, height, row_places) in enumerate(zip(shown, heights, places, strict=True)):
        suffix = str(number + 1) if number else ""
        domain = [max((top - height) / total, 0.0), (top - _TITLE) / total]
        top -= height + _GAP
        layout[f"yaxis{suffix}"] = _rows_axis(panel, domain)
        notes.append(_heading(panel, domain[1], total))
        rows = [
            _Row(rank_profile, place)
            for rank_profile, place in zip(panel.ranks, row_places, strict=True)
        ]
        if not is_aligned:
            data += _idle(panel, rows, f"y{suffix}", scale)
            end = panel.profile.step_time_s
            if end:
                end_at = fold.at(end) if fold else end
                shapes.append(_end_of_step(end_at * scale, domain))
        data += _traces(rows, f"y{suffix}", scale, unit)
        if fold is not None:
            shapes.append(_folded(fold, scale, domain))
    title = f"time since the step began, {unit}"
    if is_aligned:
        title = f"time of the actions of each row by itself, {unit}"
    layout["xaxis"] = axis(
        title,
        range=[0, longest * scale],
        anchor=f"y{len(shown) if len(shown) > 1 else ''}",
        minallowed=0,
        maxallowed=longest * scale,
        **(_ticks(fold, longest, scale) if fold else {}),
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


def _rows_axis(panel: Panel, domain: Sequence[float]) -> dict[str, Any]:
    return axis(
        domain=list(domain),
        range=[len(panel.ranks) - 0.45, -0.55],
        tickvals=list(range(len(panel.ranks))),
        ticktext=[_row_name(rank_profile, panel.profile) for rank_profile in panel.ranks],
        fixedrange=True,
        showgrid=False,
        ticks="",
        tickfont={"size": 11.5},
    )


def _ticks(fold: Fold, longest: float, scale: float) -> dict[str, Any]:
    """Return the ticks of a folded time axis, at round times on both sides of the fold."""
    wanted_step = longest * scale / 8
    power = 10.0 ** math.floor(math.log10(wanted_step))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= wanted_step)
    end = (longest - fold.width - fold.start + fold.stop) * scale
    times = [step * multiple for multiple in range(math.floor(end / step) + 1)]
    shown_times = [time for time in times if not fold.start < time / scale < fold.stop]
    return {
        "tickvals": [fold.at(time / scale) * scale for time in shown_times],
        "ticktext": [f"{time:g}" for time in shown_times],
    }


def _folded(fold: Fold, scale: float, domain: Sequence[float]) -> dict[str, Any]:
    extent = {"xref": "x", "yref": "paper", "y0": domain[0], "y1": domain[1]}
    ends = {"x0": fold.start * scale, "x1": (fold.start + fold.width) * scale}
    line = {"color": SOFT, "width": 1, "dash": "dot"}
    label = {"text": "folded", "textangle": -90, "font": {"size": 10, "color": SOFT}}
    return {"type": "rect", "line": line, "fillcolor": PAPER, "label": label, **ends, **extent}


def _row_name(rank_profile: RankProfile, profile: StepProfile) -> str:
    """Return the label of a rank's row; in a plan, one rank represents its pipeline stage."""
    stages = ",".join(map(str, rank_profile.stages))
    pp = profile.layout.get("pp") or 1
    name = f"rank {rank_profile.rank}"
    if profile.source == "predicted":
        name = "each rank" if pp == 1 else f"pp {rank_profile.coordinates.get('pp', 0)}"
    return f"{name} · s{stages}" if 0 < len(rank_profile.stages) <= 3 and pp > 1 else name


def _heading(panel: Panel, y: float, total: int) -> dict[str, Any]:
    profile = panel.profile
    labels = [f"<b>{TITLES[profile.source]}</b>"]
    if profile.step_time_s:
        labels.append(f"step {seconds(profile.step_time_s)}")
    if profile.idle is not None:
        labels.append(f"idle {profile.idle:.1%}")
    anchor = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    return note("   ".join(labels), 0, y + 1 / total, **anchor)


def _end_of_step(x: float, domain: Sequence[float]) -> dict[str, Any]:
    line = {"color": SOFT, "width": 1, "dash": "dot"}
    extent = {"xref": "x", "yref": "paper", "y0": domain[0], "y1": domain[1]}
    return {"type": "line", "x0": x, "x1": x, "line": line, "layer": "below", **extent}


def _traces(rows: Sequence[_Row], y: str, scale: float, unit: str) -> list[dict[str, Any]]:
    """Return the bars of a panel's rows: work, and waits at the lower edge of each row."""
    traces = []
    groups: dict[tuple[str, Look, bool], list[tuple[int, Span, tuple[float, float]]]] = {}
    for row_number, row in enumerate(rows):
        for span in row.rank_profile.spans:
            where = row.place(span.start, span.end)
            is_wait = span.track == "messages"
            name = "wait" if is_wait else span.name
            if where is not None:
                key = name, _look(span, row.rank_profile), is_wait
                groups.setdefault(key, []).append((row_number, span, where))
    for (name, look, is_wait), spans in sorted(groups.items(), key=lambda item: item[0][2]):
        is_action = name in ACTIONS and not is_wait
        trace: dict[str, Any] = {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "yaxis": y,
            "base": [start * scale for _, _, (start, _) in spans],
            "x": [max(end - start, 0.0) * scale for _, _, (start, end) in spans],
            "y": [row_number + (0.4 if is_wait else -0.05) for row_number, _, _ in spans],
            "width": 0.12 if is_wait else 0.74,
            "marker": look.marker(INK, 0.5 if is_action else 0),
            "hovertext": [
                _hover(span, rows[row_number].rank_profile, scale, unit)
                for row_number, span, _ in spans
            ],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
        if is_action:
            trace["text"] = [str(span.microbatch) for _, span, _ in spans]
            trace |= {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
            font = {"size": 10, "color": look.text}
            trace |= {"constraintext": "inside", "insidetextfont": font}
        traces.append(trace)
    return traces


def _idle(panel: Panel, rows: Sequence[_Row], y: str, scale: float) -> list[dict[str, Any]]:
    """Return bars for the idle time between a rank's actions.

    It counts from the first action of any rank to the last.
    """
    if panel.profile.idle is None:
        return []
    work = [work_of(row.rank_profile) for row in rows]
    first = min(span.start for spans in work for span in spans)
    last = max(span.end for spans in work for span in spans)
    gaps = []
    for row_number, (row, spans) in enumerate(zip(rows, work, strict=True)):
        edges = [(first, first), *((span.start, span.end) for span in spans), (last, last)]
        for (_, end), (start, _) in pairwise(edges):
            where = row.place(end, start)
            if start - end > (last - first) * 1e-4 and where is not None:
                gaps.append((row_number, start - end, where))
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": "idle",
            "yaxis": y,
            "base": [start * scale for _, _, (start, _) in gaps],
            "x": [(end - start) * scale for _, _, (start, end) in gaps],
            "y": [row_number - 0.05 for row_number, _, _ in gaps],
            "width": 0.74,
            "marker": IDLE.marker(width=0),
            "hovertext": [
                f"rank {rows[row_number].rank_profile.rank} is idle for {seconds(idle_seconds)} "
                "(bubble)"
                for row_number, idle_seconds, _ in gaps
            ],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
    ]


def _look(span: Span, rank_profile: RankProfile) -> Look:
    if span.track == "messages":
        return WAIT
    if span.name in ACTIONS:
        stage_position = (
            rank_profile.stages.index(span.stage) if span.stage in rank_profile.stages else 0
        )
        return (OTHER_STAGE if stage_position % 2 else ACTIONS)[span.name]
    return PHASES.get(span.name, HOST)


def _hover(span: Span, rank_profile: RankProfile, scale: float, unit: str) -> str:
    if span.track == "messages":
        where = f" along {escape(span.axis)}" if span.axis else ""
        size_text = f", {format_bytes(span.bytes)}" if span.bytes else ""
        text = f"waits: {escape(span.name)}{where}{size_text}"
    else:
        text = NAMES.get(span.name, escape(span.name))
    if span.name in ACTIONS:
        text = f"<b>{span.name} {text}</b>"
    if span.stage >= 0:
        text += f"<br>stage {span.stage}"
    if span.microbatch >= 0:
        text += f", microbatch {span.microbatch}"
    times = f"{span.start * scale:.4g} to {span.end * scale:.4g} {unit}"
    return f"{text}<br>rank {rank_profile.rank}: {seconds(span.seconds)}, {times}"


def timeline_chart(
    page: Page,
    profiles: Sequence[StepProfile | None],
    name: str = "timeline",
    longest: float = 0.0,
) -> str:
    """Return the chart of the timelines of profiles with spans, or "" if none has spans."""
    shown = panels(profiles)
    if not shown:
        return ""
    drawn = timelines(shown, longest)
    title = "Timeline of one step"
    if len(shown) > 1:
        title += ": " + " above ".join(TITLES[panel.profile.source].lower() for panel in shown)
    rows = [
        (TITLES[panel.profile.source], rank_profile.rank, _order(rank_profile))
        for panel in shown
        for rank_profile in panel.ranks
    ]
    numbers = table(("profile", "rank", "actions in order"), rows, caption="Order of actions")
    numbers += folded("Begin and end of each action", _every(shown))
    caption, key = _told(shown, len(drawn) > 1), key_of(_key(shown))
    return page.chart(name, title, drawn, caption, numbers, key=key, zoom=True, choose="Actions")


def _told(shown: Sequence[Panel], is_aligned_too: bool) -> str:
    """Return the caption of a timeline: what it shows and what it leaves out."""
    sentences = [
        "Each bar is an action, with the number of its microbatch. Drag over a stretch to zoom in."
    ]
    if any(
        len(panel.ranks)
        < len([rank_profile for rank_profile in panel.profile.ranks if rank_profile.spans])
        for panel in shown
    ):
        sentences.append("One rank represents others that do the same.")
    fold = fold_of(shown)
    if fold is not None:
        sentences.append(
            f"The middle of the step, from {seconds(fold.start)} to {seconds(fold.stop)}, is "
            "folded: it repeats the same pattern of actions."
        )
    if is_aligned_too:
        sentences.append(
            "Aligned, each row has the same action begin at the same place in both, so that what "
            "took longer is wider."
        )
    return " ".join(sentences)


def _key(shown: Sequence[Panel]) -> list[tuple[str, Look]]:
    """Return the legend of a timeline: each colour and pattern in it, with its meaning."""
    ranks = [rank_profile for panel in shown for rank_profile in panel.ranks]
    spans = [span for rank_profile in ranks for span in rank_profile.spans]
    used = {span.name for span in spans}
    pairs = [(f"{kind} {NAMES[kind]}", ACTIONS[kind]) for kind in ACTIONS if kind in used]
    if any(len(rank_profile.stages) > 1 for rank_profile in ranks):
        pairs.append(("a rank's other stage", OTHER_STAGE["F"]))
    pairs += [(NAMES[kind], PHASES[kind]) for kind in PHASES if kind in used]
    host_names = sorted({span.name for span in spans if span.track == "host"} - set(PHASES))
    if host_names:
        pairs.append((", ".join(NAMES.get(kind, kind) for kind in host_names), HOST))
    if any(span.track == "messages" for span in spans):
        pairs.append(("waits for a message", WAIT))
    if any(panel.profile.idle is not None for panel in shown):
        pairs.append(("idle: the bubble", IDLE))
    return pairs


def _order(rank_profile: RankProfile) -> str:
    names = [
        f"{span.stage}{span.name}{span.microbatch}" if span.name in ACTIONS else span.name
        for span in sorted(rank_profile.spans, key=lambda span: span.start)
        if span.track != "messages"
    ]
    shown = names[:60]
    return " ".join(shown) + (f" … {len(names) - 60} more" if len(names) > 60 else "")


def _every(shown: Sequence[Panel], limit: int = 300) -> str:
    rows = [
        (
            TITLES[panel.profile.source],
            rank_profile.rank,
            f"{span.stage}{span.name}{span.microbatch}" if span.name in ACTIONS else span.name,
            seconds(span.start),
            seconds(span.end),
        )
        for panel in shown
        for rank_profile in panel.ranks
        for span in sorted(rank_profile.spans, key=lambda span: span.start)
    ]
    cut = f"The first {limit} of {len(rows)} spans" if len(rows) > limit else "All spans"
    return table(("profile", "rank", "what", "begins", "ends"), rows[:limit], caption=cut)
