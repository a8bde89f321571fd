"""`chrome_trace`: step profiles as a trace for ui.perfetto.dev and chrome://tracing.

The format is Google's "Trace Event Format", of which only parts that Perfetto reads are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from meshwright.program.profile import MEMORY, RankProfile, Span, StepProfile

TRACKS: Final = ("compute", "messages", "host")
NAMES: Final = {"predicted": "planned", "simulated": "simulated", "measured": "measured"}
# Threads of one track that overlapping spans are spread over, at most.
_THREADS: Final = 100


class _Timed(NamedTuple):
    """A span in whole nanoseconds, so that adjacent spans do not overlap by rounding."""

    start: int
    end: int
    span: Span


def chrome_trace(profiles: Iterable[StepProfile]) -> dict[str, Any]:
    """Return profiles as one trace, with a process per profile and threads per rank and track.

    Times are in microseconds since the step began. Spans of a thread are disjoint or nested, as the
    format requires; overlapping messages of a rank use further threads. Memory is a counter of
    bytes by category for each rank.
    """
    events: list[dict[str, Any]] = []
    for process, profile in enumerate(profiles, start=1):
        events += _process(process, profile)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(process: int, profile: StepProfile) -> Iterator[dict[str, Any]]:
    step = "" if profile.step is None else f", step {profile.step}"
    name = f"{NAMES[profile.source]}: {profile.label}{step}"
    yield _metadata("process_name", process, 0, {"name": name})
    yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    for rank_profile in profile.ranks:
        for track, kind in enumerate(TRACKS):
            spans = [span for span in rank_profile.spans if span.track == kind]
            for extra, thread_spans in enumerate(_threads(spans)):
                thread = (rank_profile.rank * len(TRACKS) + track) * _THREADS + extra
                yield from _thread(process, thread, _title(rank_profile, kind, extra), thread_spans)
        yield from _counters(process, rank_profile)


def _title(rank_profile: RankProfile, track: str, extra: int) -> str:
    stages = " ".join(map(str, rank_profile.stages))
    of_stage = f", stage {stages}" if stages else ""
    return f"rank {rank_profile.rank}{of_stage}: {track}" + (f" {extra + 1}" if extra else "")


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": args}


def _thread(
    process: int, thread: int, title: str, spans: Sequence[_Timed]
) -> Iterator[dict[str, Any]]:
    yield _metadata("thread_name", process, thread, {"name": title})
    yield _metadata("thread_sort_index", process, thread, {"sort_index": thread})
    for start, end, span in spans:
        yield {
            "name": name_of(span),
            "cat": span.track,
            "ph": "X",
            "pid": process,
            "tid": thread,
            "ts": start / 1000,
            "dur": (end - start) / 1000,
            "args": _arguments(span),
        }


def name_of(span: Span) -> str:
    """Return the name of a span, such as `F stage 0 microbatch 3`, `all_gather tp` or `update`."""
    if span.stage < 0:
        return f"{span.name} {span.axis}" if span.axis else span.name
    if span.track == "messages" and not span.name.startswith(("SEND", "RECV")):
        return f"{span.name} {span.axis} stage {span.stage} microbatch {span.microbatch}"
    return f"{span.name} stage {span.stage} microbatch {span.microbatch}"


def _arguments(span: Span) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if span.stage >= 0:
        arguments |= {"stage": span.stage, "microbatch": span.microbatch}
    if span.axis:
        arguments["axis"] = span.axis
    if span.bytes:
        arguments["bytes"] = span.bytes
    return arguments


def _threads(spans: Iterable[Span]) -> list[list[_Timed]]:
    """Assign spans to threads, each to the first where it overlaps others only by nesting."""
    threads: list[list[_Timed]] = []
    # By thread: the ends of the spans that are not over, outermost first.
    open_ends: list[list[int]] = []
    timed = [_Timed(round(span.start * 1e9), round(span.end * 1e9), span) for span in spans]
    for span in sorted(timed, key=lambda span: (span.start, -span.end)):
        for ends in open_ends:
            while ends and ends[-1] <= span.start:
                ends.pop()
        free = (number for number, ends in enumerate(open_ends) if not ends or span.end <= ends[-1])
        number = next(free, len(threads))
        if number == len(threads):
            threads.append([])
            open_ends.append([])
        threads[number].append(span)
        open_ends[number].append(span.end)
    return threads


def _counters(process: int, rank_profile: RankProfile) -> Iterator[dict[str, Any]]:
    known = [name for name in MEMORY if any(point.bytes.get(name) for point in rank_profile.memory)]
    for point in rank_profile.memory:
        if point.time is not None:
            yield {
                "name": f"memory of rank {rank_profile.rank}",
                "ph": "C",
                "pid": process,
                "tid": 0,
                "ts": round(point.time * 1e9) / 1000,
                "args": {name: point.bytes.get(name, 0) for name in known},
            }
