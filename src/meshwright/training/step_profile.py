"""Combines the ranks' recordings of one step on rank 0."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

import torch
import torch.distributed as dist

from meshwright.comm.flight_recorder import Pending
from meshwright.comm.world import World
from meshwright.parsing import parse_json
from meshwright.program.lower import Program
from meshwright.program.profile import (
    CAUSES,
    MEMORY,
    MemoryPoint,
    RankProfile,
    StepProfile,
    from_json,
    to_json,
)

# In larger worlds one rank for each place in the pipeline tells all, the others causes and peaks.
DETAILED: Final = 16
_DIGITS: Final = 7  # of seconds: a tenth of a microsecond


def gather_ranks(
    world: World, program: Program, profile: RankProfile, began: float
) -> tuple[RankProfile, ...]:
    """Return all ranks' profiles on rank 0, nothing elsewhere; a collective.

    Times of `profile` are in seconds since the step began there, at `began` by rank 0's clock; the
    result has them since it began on the first of all ranks.
    """
    text = b""
    if is_detailed(program, world.rank):
        text = json.dumps(to_json([_alone(profile)])).encode()
    peak = profile.peak.bytes if profile.peak else {}
    rows = world.gather_on_host(
        [
            began,
            float(len(text)),
            *(profile.causes.get(cause, -1.0) for cause in CAUSES),
            *(float(peak.get(kind, -1)) for kind in MEMORY),
        ]
    )
    if world.rank > 0:
        if text:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            Pending(world.recorder, dist.isend(data, 0)).wait()
        return ()
    first = min(row[0] for row in rows)
    profiles = []
    for rank, row in enumerate(rows):
        if not row[1]:
            profiles.append(_summary(program, rank, row[2:]))
            continue
        if rank > 0:
            data = torch.empty(int(row[1]), dtype=torch.uint8)
            Pending(world.recorder, dist.irecv(data, rank)).wait()
            text = data.numpy().tobytes()
        profiles.append(_moved(from_json(parse_json(text))[0].ranks[0], row[0] - first))
    return tuple(profiles)


def is_detailed(program: Program, rank: int) -> bool:
    """Whether a rank records everything: with few ranks, or as the first of its stage."""
    layout = program.layout
    coordinates = layout.mesh.coordinates(rank)
    return layout.world <= DETAILED or not any(
        coordinates[axis] for axis in coordinates if axis != "pp"
    )


def _alone(profile: RankProfile) -> StepProfile:
    return StepProfile("measured", {}, "", "", (profile,))


def _summary(program: Program, rank: int, row: list[float]) -> RankProfile:
    """Return what is known of a rank from its causes and the bytes of its peak; -1: not known."""
    coordinates = program.layout.mesh.coordinates(rank)
    causes = {name: value for name, value in zip(CAUSES, row, strict=False) if value >= 0}
    kinds = zip(MEMORY, row[len(CAUSES) :], strict=True)
    peak = {kind: int(value) for kind, value in kinds if value >= 0}
    memory = (MemoryPoint("peak", None, peak),) if peak else ()
    stages = tuple(stage.index for stage in program.held(coordinates["pp"]))
    return RankProfile(rank, coordinates, stages, memory=memory, causes=causes)


def _moved(profile: RankProfile, by: float) -> RankProfile:
    """Return a rank's profile with its times moved."""

    def moved(time: float) -> float:
        return round(time + by, _DIGITS)

    return replace(
        profile,
        spans=tuple(
            span._replace(start=moved(span.start), end=moved(span.end)) for span in profile.spans
        ),
        memory=tuple(
            point if point.time is None else point._replace(time=moved(point.time))
            for point in profile.memory
        ),
    )
