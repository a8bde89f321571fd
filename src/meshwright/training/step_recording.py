"""`Recording`: records the timeline and memory of some steps on all ranks, in `ledger.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
import torch.distributed as dist

from meshwright.checkpoint.state import Trained
from meshwright.comm.clock import clock_of, clock_offset
from meshwright.comm.flight_recorder import Pending
from meshwright.comm.measured_step import MeasuredMoment, memory_points, name_of, recorded
from meshwright.comm.tape import Tape, Turn
from meshwright.comm.world import World
from meshwright.parallel.allocations import LabellingTape, MemoryProfile
from meshwright.parallel.memory_labels import NEEDED
from meshwright.parsing import parse_json
from meshwright.program.lower import Program
from meshwright.program.model_flops import flops_per_token
from meshwright.program.profile import (
    CAUSES,
    MEMORY,
    MemoryPoint,
    RankProfile,
    StepProfile,
    from_json,
    to_json,
)
from meshwright.torch_private import missing
from meshwright.training.events import note
from meshwright.training.run_folder import Job, put_step

# In larger worlds one rank for each place in the pipeline tells all, the others causes and peaks.
DETAILED: Final = 16
_DIGITS: Final = 7  # of seconds: a tenth of a microsecond


def gather_ranks(
    world: World, program: Program, profile: RankProfile, began: float
) -> tuple[RankProfile, ...]:
    """Return all ranks' profiles of a step on rank 0, an empty tuple elsewhere; a collective.

    Times of `profile` are in seconds since the step began on this rank, at `began` by rank 0's
    clock; those of the result are since it began on the first rank to begin.
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
    """Whether a rank records everything: in small worlds each does, else one per pipeline rank."""
    layout = program.layout
    coordinates = layout.mesh.coordinates(rank)
    return layout.world <= DETAILED or not any(
        coordinates[axis] for axis in coordinates if axis != "pp"
    )


def _alone(profile: RankProfile) -> StepProfile:
    return StepProfile("measured", {}, "", "", (profile,))


def _summary(program: Program, rank: int, row: list[float]) -> RankProfile:
    """Return the profile of a rank that sent only its causes of time and peak bytes; -1:
    unknown.
    """
    coordinates = program.layout.mesh.coordinates(rank)
    causes = {name: value for name, value in zip(CAUSES, row, strict=False) if value >= 0}
    kinds = zip(MEMORY, row[len(CAUSES) :], strict=True)
    peak = {kind: int(value) for kind, value in kinds if value >= 0}
    memory = (MemoryPoint("peak", None, peak),) if peak else ()
    stages = tuple(stage.index for stage in program.held(coordinates["pp"]))
    return RankProfile(rank, coordinates, stages, memory=memory, causes=causes)


def _moved(profile: RankProfile, by: float) -> RankProfile:
    """Return a rank's profile with all times shifted by `by` seconds."""

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


# Steps after the one that a run begins or goes on at: the first is unlike the others.
MEMORY_AFTER: Final = 2
SPANS_AFTER: Final = 3


class Recording:
    """Records when each action of a step ran, each `log.trace` steps, and once with
    `log.trace_memory` what was in memory then; the events go to the run's folder.

    Its methods are collectives: every rank makes the same calls.
    """

    def __init__(self, job: Job, world: World, trained: Trained, done: int) -> None:
        """Start after the step `done`; measures the offset of this machine's clock. A
        collective.
        """
        self._job, self._world, self._trained = job, world, trained
        self._every, self._done = job.config.log.trace, done
        self._offset = clock_offset(world) if self._every else 0.0
        self._lacks = missing(*NEEDED) if self._every and job.config.log.trace_memory else None
        if self._lacks is not None and world.rank == 0:
            note(f"memory is not recorded: {self._lacks}")
        self._profile: MemoryProfile | None = None
        self._turns: tuple[Turn, ...] = ()  # of the step whose memory was recorded
        self._moments: list[MeasuredMoment] = []

    def is_due(self, step: int) -> bool:
        """Whether a step is recorded, in time or memory."""
        return self._holds_memory(step) or self._has_spans(step)

    def _holds_memory(self, step: int) -> bool:
        return bool(self._every) and step - self._done == MEMORY_AFTER and self._has_memory

    def _has_spans(self, step: int) -> bool:
        after = step - self._done
        is_nth = self._every > 0 and after > SPANS_AFTER and step % self._every == 0
        return bool(self._every) and (after == SPANS_AFTER or is_nth)

    def begin(self, step: int) -> None:
        """Start to record a step, if it is due."""
        recorder = self._world.recorder
        if self._holds_memory(step):
            self._profile = MemoryProfile(*self._trained)
            self._profile.__enter__()
            recorder.tape = LabellingTape()
        elif self._has_spans(step):
            recorder.tape = Tape(clock_of(self._world.device))

    @property
    def is_on(self) -> bool:
        """Whether the current step is recorded."""
        return self._world.recorder.tape is not None

    @property
    def _has_memory(self) -> bool:
        """Whether memory is recorded; not on a CPU with a memory limit, which would count the
        profiler's.
        """
        log, cluster = self._job.config.log, self._job.config.cluster
        return (
            log.trace_memory
            and not self._lacks
            and (cluster.memory is None or self._world.device.type == "cuda")
        )

    def end(self, step: int) -> None:
        """End the recording of a step, if it is recorded; rank 0 writes the timelines of
        all ranks.
        """
        tape, self._world.recorder.tape = self._world.recorder.tape, None
        if tape is None:
            return
        tape.stop()
        if self._profile is not None:
            self._profile.__exit__()
            self._turns, self._moments = tuple(tape.turns), self._profile.moments()
            self._profile = None
            return
        self._tell(step, tape)

    def abandon(self) -> None:
        """End the recording of a step that does not end, without a word of it."""
        self._world.recorder.tape = None
        if self._profile is not None:
            self._profile.__exit__()
            self._profile = None

    def _tell(self, step: int, tape: Tape) -> None:
        """Gather a step's recordings, and write them on rank 0."""
        world, program = self._world, self._trained.parallel.program
        layout = program.layout
        record = recorded(tape, world.recorder.label, pp=layout.pp, dp=layout.dp)
        is_same = [name_of(t) for t in tape.turns] == [name_of(t) for t in self._turns]
        points = memory_points(self._turns, self._moments, record.turns if is_same else None)
        coordinates = layout.mesh.coordinates(world.rank)
        profile = RankProfile(
            world.rank,
            coordinates,
            tuple(stage.index for stage in program.held(coordinates["pp"])),
            record.spans,
            self._with_fixed(points),
            record.traffic,
            record.causes,
        )
        ranks = gather_ranks(world, program, profile, record.began + self._offset)
        if world.rank == 0:
            put_step(self._job.folder, self._step_profile(step, ranks))

    def _with_fixed(self, points: Sequence[MemoryPoint]) -> tuple[MemoryPoint, ...]:
        """Add, on a GPU, the memory that torch has not allocated as "fixed" bytes to all points."""
        device = self._world.device
        if device.type != "cuda":
            return tuple(points)
        free, total = torch.cuda.mem_get_info(device)
        fixed = total - free - torch.cuda.memory_allocated(device)
        return tuple(p._replace(bytes={**p.bytes, "fixed": fixed}) for p in points)

    def _step_profile(self, step: int, ranks: tuple[RankProfile, ...]) -> StepProfile:
        """Return the step profile of all ranks; the slowest rank determines the step time."""
        job, config = self._job, self._job.config
        train, cluster = config.train, config.cluster
        seconds = max(sum(rank.causes.values()) for rank in ranks)
        tokens_per_s = train.batch * train.seq_len / seconds
        tflops = tokens_per_s * flops_per_token(config.model, train.seq_len) / len(ranks) / 1e12
        limit = cluster.memory
        if limit is None and self._world.device.type == "cuda":
            limit = torch.cuda.get_device_properties(self._world.device).total_memory
        return StepProfile(
            "measured",
            job.layout.model_dump(mode="json"),
            job.layout.label,
            job.machine.name,
            ranks,
            step,
            seconds,
            tokens_per_s,
            None if cluster.peak_tflops is None else tflops / cluster.peak_tflops,
            limit,
        )
