"""Charts in plain characters: a pipeline's timeline, seconds by cause, memory and its limit.

They are `rich` texts of limited width, printed without colour outside a terminal; no chart depends
on its colours.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Final

from rich.text import Text

from meshwright.program.profile import CAUSES, MEMORY, RankProfile, Span, StepProfile, of_source
from meshwright.report.agreement import agreement, peak_name
from meshwright.report.trace import NAMES
from meshwright.units import format_bytes, format_seconds

WIDTH: Final = 80
# Ranks that are drawn at most: of more, the first and the last.
_MOST: Final = 16
_IDLE: Final = "."
_COLOURS: Final[Mapping[str, str]] = {
    "F": "green",
    "B": "blue",
    "I": "cyan",
    "W": "magenta",
    _IDLE: "dim",
    "compute": "green",
    "bubble": "dim",
    "fixed": "dim",
}
_MEANINGS: Final[Mapping[str, str]] = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
}
_BAR: Final = "#"
_LONGEST: Final = max(map(len, MEMORY))
# A part of a step below this share is not shown.
_LEAST: Final = 0.001


def summary(profiles: Sequence[StepProfile], width: int = WIDTH) -> Text:
    """Return all charts that the profiles have data for, predicted above measured.

    With a predicted and a measured profile, a sentence compares them.
    """
    charts = [timeline_chart(profile, width) for profile in profiles]
    planned, measured = (of_source(profiles, source) for source in ("predicted", "measured"))
    agreed = agreement(planned, measured) if planned and measured else None
    if agreed:
        charts.append(Text(fill(agreed.words, width)))
    charts += [causes_chart(profiles, width), memory_chart(profiles, width)]
    return Text("\n\n").join(chart for chart in charts if chart)


def timeline_chart(profile: StepProfile, width: int = WIDTH) -> Text:
    """Return a line of characters for each pipeline rank, which shows its actions over the step.

    A character is the kind of action in the middle of its time interval, or a dot if idle. Empty if
    the profile has no actions.
    """
    first_by_pp_rank: dict[int, RankProfile] = {}
    for rank_profile in profile.ranks:
        if any(span.track == "compute" for span in rank_profile.spans):
            first_by_pp_rank.setdefault(rank_profile.coordinates.get("pp", 0), rank_profile)
    if not first_by_pp_rank:
        return Text()
    spans_by_rank = {
        rank_profile.rank: [span for span in rank_profile.spans if span.track == "compute"]
        for rank_profile in first_by_pp_rank.values()
    }
    first = min(span.start for spans in spans_by_rank.values() for span in spans)
    last = max(span.end for spans in spans_by_rank.values() for span in spans)
    label = max(len(f"rank {rank} ") for rank in spans_by_rank)
    columns = max(width - label, 10)
    lines = [_title(profile, last - first)]
    seen: set[str] = set()
    for rank in _shown(list(spans_by_rank)):
        if rank is None:
            lines.append(Text("..."))
            continue
        letters = _letters(spans_by_rank[rank], first, last, columns)
        seen.update(letters)
        lines.append(Text(f"rank {rank} ".ljust(label)).append_text(_coloured(letters)))
    scale = format_seconds(last - first)
    lines.append(Text(" " * label + "0 s" + scale.rjust(columns - 3), style="dim"))
    known = [f"{kind} {meaning}" for kind, meaning in _MEANINGS.items() if kind in seen]
    lines.append(Text(" " * label + ", ".join([*known, f"{_IDLE} waiting"]), style="dim"))
    return _lines(lines, width)


def _title(profile: StepProfile, seconds: float) -> Text:
    step = "" if profile.step is None else f", step {profile.step}"
    idle = "" if profile.idle is None else f", idle {profile.idle:.1%} of them"
    of_step = ""
    if profile.step_time_s is not None:
        of_step = f" of a step of {format_seconds(profile.step_time_s)}"
    text = f"{NAMES[profile.source]}{step}: actions {format_seconds(seconds)}{of_step}{idle}"
    return Text(text, style="bold")


def _letters(spans: Sequence[Span], first: float, last: float, columns: int) -> str:
    """Return one character per column: the kind of action at its middle, or the mark for idle."""
    spans = sorted(spans, key=lambda span: span.start)
    starts = [span.start for span in spans]
    letters = []
    for column in range(columns):
        time = first + (column + 0.5) * (last - first) / columns
        latest = spans[max(bisect(starts, time) - 1, 0)]
        letters.append(latest.name[0] if latest.start <= time < latest.end else _IDLE)
    return "".join(letters)


def causes_chart(profiles: Sequence[StepProfile], width: int = WIDTH) -> Text:
    """Return bars of the seconds of a step by cause, averaged over the ranks of each profile.

    Predicted above measured if there are both. Empty if no profile has causes.
    """
    known = [(profile, _average(profile)) for profile in profiles]
    known = [(profile, causes) for profile, causes in known if causes]
    if not known:
        return Text()
    longest = max(max(causes.values()) for _, causes in known)
    lines = [Text("seconds of a step by cause, mean of the ranks", style="bold")]
    for cause in CAUSES:
        shares = [causes.get(cause, 0.0) / sum(causes.values()) for _, causes in known]
        if max(shares) < _LEAST:
            continue
        for index, (profile, causes) in enumerate(known):
            seconds = causes.get(cause, 0.0)
            value_text = f"{format_seconds(seconds):>9} {shares[index]:>6.1%}"
            label = f"{cause if not index else '':<10}{_named(profile, len(known) > 1)}"
            bar_width = max(width - len(label) - len(value_text) - 1, 5)
            bar = _bar(seconds / longest, bar_width)
            style = _COLOURS.get(cause, "yellow")
            lines.append(Text(label).append(bar, style=style).append(f" {value_text}"))
    return _lines(lines, width)


def _named(profile: StepProfile, is_one_of_several: bool) -> str:
    return f"{NAMES[profile.source]:<10}" if is_one_of_several else ""


def _average(profile: StepProfile) -> dict[str, float]:
    sums: dict[str, float] = {}
    known = [rank_profile for rank_profile in profile.ranks if rank_profile.causes]
    for rank_profile in known:
        for cause, seconds in rank_profile.causes.items():
            sums[cause] = sums.get(cause, 0.0) + seconds / len(known)
    return {cause: seconds for cause, seconds in sums.items() if seconds > 0}


def memory_chart(profiles: Sequence[StepProfile], width: int = WIDTH) -> Text:
    """Return a bar of the peak memory of each rank, with the device's limit if it is known.

    Predicted above measured if there are both. Empty if no profile has memory.
    """
    rows = [
        (profile, rank_profile)
        for profile in profiles
        for rank_profile in profile.ranks
        if rank_profile.peak is not None and rank_profile.peak.total
    ]
    if not rows:
        return Text()
    limits = [profile.memory_limit for profile, _ in rows if profile.memory_limit]
    peaks = [rank_profile.peak.total for _, rank_profile in rows if rank_profile.peak]
    scale = max([*limits, *peaks])
    several = len({profile.source for profile, _ in rows}) > 1
    name = peak_name(
        max(
            (rank_profile.peak for _, rank_profile in rows if rank_profile.peak),
            key=lambda peak: peak.total,
        )
    )
    head = f"{name}; {format_bytes(max(limits))} is the limit" if limits else name
    lines = [Text(head, style="bold")]
    for rank in _shown(sorted({rank_profile.rank for _, rank_profile in rows})):
        if rank is None:
            lines.append(Text("..."))
            continue
        rank_rows = [
            (profile, rank_profile) for profile, rank_profile in rows if rank_profile.rank == rank
        ]
        for index, (profile, rank_profile) in enumerate(rank_rows):
            label = f"{f'rank {rank}' if not index else '':<10}{_named(profile, several)}"
            lines.append(_memory_line(profile, rank_profile, label, scale, width))
    return _lines(lines, width)


def _memory_line(
    profile: StepProfile, rank_profile: RankProfile, label: str, scale: int, width: int
) -> Text:
    peak = rank_profile.peak
    assert peak is not None
    largest = max(peak.bytes, key=lambda kind: peak.bytes[kind])
    value_text = f"{format_bytes(peak.total):>11}, mostly {largest:<{_LONGEST}}"
    bar_width = max(width - len(label) - len(value_text) - 3, 5)
    bar = _bar(peak.total / scale, bar_width)
    over = profile.memory_limit is not None and peak.total > profile.memory_limit
    text = Text(label + "[").append(bar, style="red" if over else "green")
    return text.append("] " + value_text, style="red" if over else "")


def _bar(share: float, room: int) -> str:
    return (_BAR * max(round(room * share), share > 0)).ljust(room)


def _shown(ranks: Sequence[int]) -> Iterator[int | None]:
    """Yield the ranks to draw, with None in place of those left out in the middle."""
    if len(ranks) <= _MOST:
        yield from ranks
        return
    yield from ranks[: _MOST // 2]
    yield None
    yield from ranks[-_MOST // 2 :]


def _coloured(letters: str) -> Text:
    text = Text()
    for letter in letters:
        text.append(letter, style=_COLOURS.get(letter, ""))
    return text


def _lines(lines: Sequence[Text], width: int) -> Text:
    for line in lines:
        line.truncate(width)
        line.rstrip()
    return Text("\n").join(lines)
