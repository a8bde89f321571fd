"""Where a timeline draws spans: by time, with the middle folded, or action by action."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from meshwright.program.profile import RankProfile, Span, StepProfile
from meshwright.report.agreement import done_by

# Spans of one profile that are drawn without a fold: a browser draws them in well under a second.
MOST_SPANS: Final = 5000
# Spans that go with an action, in a picture that is to have no more than that: it and its messages.
_SPANS_OF_ACTION: Final = 3
# The fold's share of the picture.
_WIDTH: Final = 0.04
# Where a stretch of time is drawn; None where it isn't.
Place = Callable[[float, float], tuple[float, float] | None]


class Panel(NamedTuple):
    """One profile of a timeline, with its drawn ranks."""

    profile: StepProfile
    ranks: tuple[RankProfile, ...]

    @property
    def end(self) -> float:
        """The end of its last span, or of the step, in seconds."""
        last = max(span.end for rank_profile in self.ranks for span in rank_profile.spans)
        return max(last, self.profile.step_time_s or 0.0)


class Fold(NamedTuple):
    """A step's folded middle, from `start` to `stop` in seconds, drawn `width` seconds wide."""

    start: float
    stop: float
    width: float

    def at(self, time: float) -> float:
        """Return where a moment is drawn; one in the middle is at the fold's left edge."""
        is_after = time >= self.stop
        return time - self.stop + self.start + self.width if is_after else min(time, self.start)

    def place(self, start: float, end: float) -> tuple[float, float] | None:
        """Return where an interval is drawn, for the part outside of the fold."""
        if self.start <= start and end <= self.stop:
            return None
        begins = self.at(max(start, self.stop)) if start >= self.start else start
        return begins, max(begins, self.at(end))


def as_timed(start: float, end: float) -> tuple[float, float]:
    """Place an interval at its own time."""
    return start, end


def work_of(rank_profile: RankProfile) -> list[Span]:
    """Return a rank's computing actions, in order."""
    return sorted(
        (span for span in rank_profile.spans if span.track == "compute"),
        key=lambda span: span.start,
    )


def fold_of(panels: Sequence[Panel]) -> Fold | None:
    """Return the folded part of some profiles: the middle of those with too many spans to draw.

    On each rank, the actions that fill and drain the pipeline remain, and some of those between.
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
    """Return row positions at which the same actions of some panels begin together.

    Rows of the same place in the pipeline give each action as much room as the row in which it and
    the wait for the next one took longest. None if there is nothing to compare, or if rows did not
    do the same actions in the same order.
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
    """Return where the actions of some rows begin, each after the longest one before it."""
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
