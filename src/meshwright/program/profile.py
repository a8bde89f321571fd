"""`StepProfile`: a step on each rank, in one schema for predicted, simulated and measured steps.

`ledger.json` of a run folder holds `{"schema": 1, "ledgers": [...]}`, as `to_json` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

SCHEMA: Final = 1

Source = Literal["predicted", "simulated", "measured"]
# Where a span is drawn: what the rank computes, what it waits for from others, the rest.
Track = Literal["compute", "messages", "host"]

# What memory is for. `gathered` are whole weights made of shards, and copies of weights in another
# precision; `buffers` are those of collectives; `fixed` is what is not the program's: a CUDA
# context, NCCL, the allocator's reserve.
MEMORY: Final = (
    "parameters",
    "optimizer",
    "gradients",
    "gathered",
    "activations",
    "buffers",
    "fixed",
)
# What a step's time goes to. Axes stand for messages that the rank waits for; `bubble` is waiting
# for another pipeline stage, its messages included; `data` are those of data parallelism; `input`
# is waiting for the batch; `host` is the rest.
CAUSES: Final = (
    *("compute", "recompute", "tp", "cp", "ep", "data", "bubble", "optimizer", "input", "host"),
)


class Span(NamedTuple):
    """An interval of a rank's time, in seconds since the step began on the first of all ranks.

    `name` is an action of the table (`F`, `SEND_B`), a kind of collective (`all_gather`) or a phase
    (`input`, `reduce`, `update`); `stage` and `microbatch` are -1 if it has none.
    """

    track: Track
    name: str
    start: float
    end: float
    stage: int = -1
    microbatch: int = -1
    axis: str = ""
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.start


class MemoryPoint(NamedTuple):
    """A rank's memory at a moment: the action or phase, the time, and bytes by category of
    `MEMORY`.

    `time` is in seconds as in `Span`; None if a profile knows only the order.
    """

    at: str
    time: float | None
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """The bytes of all categories."""
        return sum(self.bytes.values())


class Traffic(NamedTuple):
    """A kind of message of a rank in a step, as in `program.collectives.Collective`.

    `times` is their number; `seconds` is how long the rank waited for all of them, or None if that
    is not known.
    """

    kind: str
    axis: str
    bytes: int
    times: int
    seconds: float | None = None


@dataclass(frozen=True)
class RankProfile:
    """A step on one rank; unknown fields are empty."""

    rank: int
    coordinates: Mapping[str, int]
    stages: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    memory: tuple[MemoryPoint, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    causes: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> MemoryPoint | None:
        """The first point with the most bytes; None without memory."""
        return max(self.memory, key=lambda point: point.total, default=None)


@dataclass(frozen=True)
class StepProfile:
    """A step on some ranks of a layout; one rank may stand for others like it.

    `step` is the number of the measured step, or None. `memory_limit` is the device's in bytes, if
    it has one.
    """

    source: Source
    layout: Mapping[str, Any]
    label: str
    device: str
    ranks: tuple[RankProfile, ...]
    step: int | None = None
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory_limit: int | None = None

    @property
    def worst(self) -> RankProfile | None:
        """The first rank with the highest known peak; None if none has memory."""
        known = [rank for rank in self.ranks if rank.memory]
        return max(known, key=_peak_bytes, default=None)

    @property
    def idle(self) -> float | None:
        """The pipeline bubble: the share of the ranks' time in which no action computes.

        Counted from the first action of any rank to the end of the last, over one rank for each
        place in the pipeline; None without a pipeline, or without spans.
        """
        places: dict[int, RankProfile] = {}
        for rank in self.ranks:
            places.setdefault(rank.coordinates.get("pp", 0), rank)
        work = [[s for s in rank.spans if s.track == "compute"] for rank in places.values()]
        if len(places) < 2 or not all(work):
            return None
        first = min(span.start for spans in work for span in spans)
        last = max(span.end for spans in work for span in spans)
        busy = sum(span.seconds for spans in work for span in spans)
        return 1 - busy / (len(work) * (last - first))


def _peak_bytes(rank: RankProfile) -> int:
    return rank.peak.total if rank.peak else 0


def to_json(profiles: Iterable[StepProfile]) -> dict[str, Any]:
    """Return profiles as the document of `ledger.json`; spans and points are written as lists, to
    save space."""
    return {"schema": SCHEMA, "ledgers": [_profile_json(profile) for profile in profiles]}


def _profile_json(profile: StepProfile) -> dict[str, Any]:
    worst = profile.worst
    peak = worst.peak if worst else None
    return {
        "source": profile.source,
        "step": profile.step,
        "layout": dict(profile.layout),
        "label": profile.label,
        "device": profile.device,
        "memory_limit": profile.memory_limit,
        "step_time_s": profile.step_time_s,
        "tokens_per_s": profile.tokens_per_s,
        "mfu": profile.mfu,
        "idle": profile.idle,
        "peak_memory_bytes": peak.total if peak else None,
        "worst_rank": worst.rank if worst else None,
        "ranks": [
            {
                "rank": rank.rank,
                "coordinates": dict(rank.coordinates),
                "stages": list(rank.stages),
                "causes": dict(rank.causes),
                "spans": [list(span) for span in rank.spans],
                "memory": [[point.at, point.time, dict(point.bytes)] for point in rank.memory],
                "traffic": [list(traffic) for traffic in rank.traffic],
            }
            for rank in profile.ranks
        ],
    }


def from_json(document: Mapping[str, Any]) -> tuple[StepProfile, ...]:
    """Return the profiles of a document; raises `ValueError` for one of another schema."""
    if document.get("schema") != SCHEMA:
        raise ValueError(f"schema {document.get('schema')!r} is not the known one, {SCHEMA}")
    return tuple(_profile(profile) for profile in document["ledgers"])


def _profile(fields: Mapping[str, Any]) -> StepProfile:
    keys = (
        *("source", "layout", "label", "device", "step"),
        *("step_time_s", "tokens_per_s", "mfu", "memory_limit"),
    )
    ranks = tuple(_rank(rank) for rank in fields["ranks"])
    return StepProfile(ranks=ranks, **{key: fields[key] for key in keys})


def _rank(fields: Mapping[str, Any]) -> RankProfile:
    return RankProfile(
        fields["rank"],
        fields["coordinates"],
        tuple(fields["stages"]),
        tuple(Span(*span) for span in fields["spans"]),
        tuple(MemoryPoint(*point) for point in fields["memory"]),
        tuple(Traffic(*traffic) for traffic in fields["traffic"]),
        fields["causes"],
    )


def of_source(profiles: Sequence[StepProfile], source: Source) -> StepProfile | None:
    """Return the last profile with this source, or None."""
    return next((profile for profile in reversed(profiles) if profile.source == source), None)
