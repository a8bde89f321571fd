"""Breaks down a rank's memory at the peak of a step by what it contains, for any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.comm.collective_recorder import CollectiveRecorder
from meshwright.comm.groups import open_groups
from meshwright.comm.world import World
from meshwright.layout import broken
from meshwright.parallel.allocations import (
    TURN,
    AllocatedPiece,
    LabellingTape,
    alive,
    events_of,
    label,
    labelled_gradients,
    lasting,
    pieces_of,
)
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.parallel.memory_labels import labelled_in_data
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine, program_of
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, update

STEPS: Final = 4


@dataclass
class AllocatedMemory:
    """The bytes of a rank by content, without what is offloaded to the host.

    `parameters` are the trained weights or their shards, `gathered` whole weights made of these,
    `buffers` those of FSDP2 and gloo for collectives, and `rest` mostly activations.
    """

    parameters: float = 0
    gathered: float = 0
    gradients: float = 0
    optimizer: float = 0
    buffers: float = 0
    rest: float = 0

    @property
    def total(self) -> float:
        """The sum of all bytes."""
        return float(sum(asdict(self).values()))


@dataclass
class Measured:
    """A rank's memory at the peak of a step and at its start, and the allocations at the peak.

    `moment` is the action, or the phase after the last action, in which the peak occurs.
    """

    peak: AllocatedMemory
    start: AllocatedMemory
    moment: str
    pieces: list[AllocatedPiece] = field(repr=False)


def measure(world: World, case: Case) -> Measured:
    """Return the memory of this rank in one training step after the first.

    All ranks must call this.
    """
    model, train, layout = case.model, case.train, case.layout
    broken_rule = broken(model, train, layout)
    assert broken_rule is None, broken_rule
    groups, program = open_groups(layout, world), program_of(case, world)
    batch = mine(make_batch(case, 0), program, world)
    with (
        CollectiveRecorder(world.recorder),
        labelled_in_data(label),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        parallel = build(program, groups, world.device, seeded(model, 0))
        shards = Shards(parallel.trained, on_host=layout.offload == "optimizer")
        optimizer = build_optimizer(shards.leaves, shards.parts, case.optimizer)
        world.recorder.tape = LabellingTape()
        with labelled_gradients(parallel, shards):
            for step in range(STEPS):
                with record_function("measured" if step else "first"):
                    update(parallel, batch, world, shards, optimizer, LossScale.settled(train), 1.0)
                for kind, tensor in lasting(parallel, shards, optimizer):
                    label(kind, tensor)
        world.recorder.tape = None
    return sorted(_peaks(seen), key=lambda measured: measured.peak.total)[(STEPS - 1) // 2]


def _peaks(seen: profile) -> Iterator[Measured]:
    """Yield the memory at the peak of each measured step."""
    events = events_of(seen)
    pieces = pieces_of(events)
    changes = [(piece.start, piece.size) for piece in pieces]
    changes += [(piece.end, -piece.size) for piece in pieces if piece.end is not None]
    changes.sort()
    moments = [(e.start_time_ns, e.name) for e, _ in events if e.name.startswith(TURN)]
    for node, _ in events:
        if node.name != "measured":
            continue
        total = peak = 0
        peak_time = node.start_time_ns
        for time, change in changes:
            total += change
            if node.start_time_ns < time < node.end_time_ns and total > peak:
                peak, peak_time = total, time
        alive_pieces = alive(pieces, peak_time)
        before = [name for time, name in moments if node.start_time_ns < time <= peak_time]
        moment = before[-1].removeprefix(TURN) if before else ""
        yield Measured(
            _sum(alive_pieces), _sum(alive(pieces, node.start_time_ns)), moment, alive_pieces
        )


def _sum(pieces: Sequence[AllocatedPiece]) -> AllocatedMemory:
    sums = Counter[str]()
    for piece in pieces:
        sums[piece.kind] += piece.size
    return AllocatedMemory(**sums)
