"""Converts a tape into a `RankProfile`'s contents: spans, messages and seconds by cause of a step.

Doesn't import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, get_args

from meshwright.comm.tape import Sent, Tape, Turn
from meshwright.program.messages import Axis
from meshwright.program.profile import CAUSES, MemoryPoint, Span, Traffic

COMPUTE: Final = ("F", "B", "I", "W")
# Phases as a profile of a step names them.
PHASES: Final = {"data": "input"}
# Where the step's own messages end, and those about it begin.
AFTER: Final = "log"
_AXES: Final = get_args(Axis)
_CAUSES: Final[Mapping[str, str]] = {
    "tp": "tp",
    "cp": "cp",
    "pp": "bubble",
    "ep": "ep",
    "shard": "data",
    "expert_shard": "data",
    "replicate": "data",
    "expert_replicate": "data",
    "data": "data",
    "ends": "data",
}
# Which turns belong to which cause, but for the waits in them.
_WORK: Final[Mapping[str, Callable[[Span], bool]]] = {
    "compute": lambda span: span.track == "compute",
    "bubble": lambda span: span.track == "messages",
    "optimizer": lambda span: span.name == "update",
    "input": lambda span: span.name == "input",
}
# A message that takes less of the step is counted, and not drawn.
SHORTEST: Final = 1 / 2000


class _Waited(NamedTuple):
    """A wait, in seconds since the step began on this rank, with its axis and the awaited
    messages."""

    since: float
    until: float
    axis: str
    messages: tuple[Sent, ...]


@dataclass(frozen=True)
class Recorded:
    """A recorded step on one rank: `began` by its monotonic clock, other times in seconds since
    then.

    `turns` are the times at which the tape's actions and phases began, and the end of the step.
    """

    began: float
    seconds: float
    turns: tuple[float, ...]
    spans: tuple[Span, ...]
    traffic: tuple[Traffic, ...]
    causes: Mapping[str, float]


def recorded(tape: Tape, label: Callable[[int], str], *, pp: int, dp: int) -> Recorded:
    """Return the spans, messages and causes of a tape; `label` maps a group's number to its axis.

    A wait for the whole world counts as waiting for other stages if there are any (`pp` > 1),
    otherwise for the `dp` replicas: it is at the end of the backward, where they meet.
    """
    began = tape.clock.seconds(tape.began)

    def at(stamp: object) -> float:
        return tape.clock.seconds(stamp) - began

    seconds = at(tape.ended)
    begins = [at(turn.at) for turn in tape.turns]
    times = (*begins, seconds)
    waits = sorted(_waits(tape, label, at))
    world = "bubble" if pp > 1 else "data" if dp > 1 else "tp"
    turns = list(zip(tape.turns, pairwise(times), strict=True))
    work = [_worked(turn, interval, waits) for turn, interval in turns]
    messages = [span for span in work if span.track == "messages"]
    messages += _waiting(tape.turns, waits)
    spans = [span for span in work if span.track != "messages"]
    spans += [span for span in messages if span.seconds >= seconds * SHORTEST]
    return Recorded(
        began,
        seconds,
        times,
        tuple(sorted(spans, key=lambda span: (span.start, span.track))),
        _traffic(tape, label, waits),
        _by_cause(seconds, work, waits, {**_CAUSES, "world": world}),
    )


def _waits(
    tape: Tape, label: Callable[[int], str], seconds_of: Callable[[object], float]
) -> Iterator[_Waited]:
    """Yield the waits along the layout's axes; those of a save have groups of their own and are
    left out."""
    for wait in tape.waits:
        messages = tuple(tape.sent[entry] for entry in wait.entries if entry in tape.sent)
        axis = label(messages[-1].group) if messages else ""
        if axis in _AXES:
            yield _Waited(seconds_of(wait.since), seconds_of(wait.until), axis, messages)


def _worked(turn: Turn, interval: tuple[float, float], waits: Sequence[_Waited]) -> Span:
    """Return the span of an action, of the beginning of a transfer, or of a phase.

    A computing action begins when its input has arrived: the wait for it is not part of it.
    """
    start, end = interval
    if turn.name in COMPUTE:
        arrivals = [w.until for w in waits if w.axis == "pp" and start <= w.since < end]
        start = min(max([start, *arrivals]), end)
        return Span("compute", turn.name, start, end, turn.stage, turn.microbatch)
    if turn.stage >= 0:
        return Span("messages", turn.name, start, end, turn.stage, turn.microbatch, "pp")
    return Span("host", PHASES.get(turn.name, turn.name), start, end)


def _waiting(turns: Sequence[Turn], waits: Sequence[_Waited]) -> Iterator[Span]:
    """Yield the spans of waits; a wait between stages has the name of its action."""
    for wait in waits:
        last, size = wait.messages[-1], sum(message.bytes for message in wait.messages)
        turn = turns[last.turn]
        name, stage, microbatch = last.kind, -1, -1
        if wait.axis == "pp":
            name, stage, microbatch = turn.name, turn.stage, turn.microbatch
        yield Span("messages", name, wait.since, wait.until, stage, microbatch, wait.axis, size)


def _traffic(
    tape: Tape, label: Callable[[int], str], waits: Sequence[_Waited]
) -> tuple[Traffic, ...]:
    """Return the step's messages by kind, axis and bytes, with the seconds of waiting for them.

    A wait for several messages counts for the last of them.
    """
    times: dict[tuple[str, str, int], int] = {}
    seconds: dict[tuple[str, str, int], float] = {}
    for sent in tape.sent.values():
        axis = label(sent.group)
        if axis in _AXES and tape.turns[sent.turn].name != AFTER:
            key = (sent.kind, axis, sent.bytes)
            times[key] = times.get(key, 0) + 1
    for wait in waits:
        last = wait.messages[-1]
        key = (last.kind, wait.axis, last.bytes)
        if tape.turns[last.turn].name != AFTER:
            seconds[key] = seconds.get(key, 0.0) + wait.until - wait.since
    return tuple(Traffic(*key, times[key], seconds.get(key, 0.0)) for key in sorted(times))


def _by_cause(
    seconds: float,
    work: Sequence[Span],
    waits: Sequence[_Waited],
    causes: Mapping[str, str],
) -> Mapping[str, float]:
    """Return the seconds of a step by cause; they add up to the whole step.

    Where waits overlap, the time counts for the one that began first.
    """
    by_cause = dict.fromkeys(CAUSES, 0.0)
    del by_cause["recompute"]  # cannot be told from computation here
    alone: list[tuple[float, float]] = []
    until = 0.0
    for wait in waits:
        since, until = max(wait.since, until), max(wait.until, until)
        if since < until:
            alone.append((since, until))
            by_cause[causes[wait.axis]] += until - since
    for cause, is_one in _WORK.items():
        intervals = [(span.start, span.end) for span in work if is_one(span)]
        by_cause[cause] += _without(intervals, alone)
    by_cause["host"] = seconds - sum(by_cause.values())
    return by_cause


def _without(
    intervals: Sequence[tuple[float, float]], waits: Sequence[tuple[float, float]]
) -> float:
    """Return the seconds of intervals outside of waits; both are sorted and do not overlap."""
    total, first = 0.0, 0
    for start, end in intervals:
        total += end - start
        while first < len(waits) and waits[first][1] <= start:
            first += 1
        for since, until in waits[first:]:
            if since >= end:
                break
            total -= min(until, end) - max(since, start)
    return total


class MeasuredMoment(NamedTuple):
    """Measured memory within an action or phase, given by its index `turn` and the `share` of its
    time.

    `bytes` are by category of `program.profile.MEMORY`.
    """

    turn: int
    share: float
    bytes: Mapping[str, int]


def memory_points(
    turns: Sequence[Turn], moments: Sequence[MeasuredMoment], times: Sequence[float] | None
) -> tuple[MemoryPoint, ...]:
    """Return measured memory as the memory points of a step with the same actions and phases.

    `times` are the beginnings of its turns, then its end, in seconds; None if its turns differ.
    """
    points = []
    for moment in moments:
        is_end = moment.turn == len(turns)
        time = None
        if times is not None:
            start, end = times[moment.turn], times[min(moment.turn + 1, len(turns))]
            time = start + moment.share * (end - start)
        points.append(
            MemoryPoint("end" if is_end else name_of(turns[moment.turn]), time, moment.bytes)
        )
    return tuple(points)


def name_of(turn: Turn) -> str:
    """Return the name of a turn in a step profile, such as "F 0 1" or "input"."""
    return PHASES.get(turn.name, str(turn))
