"""The time of a pipeline: in closed form for a search, and by events over the action table."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.layout.schedules import SCHEDULES
from meshwright.program.actions import Action, inputs, marks
from meshwright.program.lower import Program
from meshwright.program.schedule import compute_tables, stage_ranks
from meshwright.program.timing import simulate

# Microbatches that are carried out on paper; a pipeline's further ones each add the same.
_SIMULATED = 4


def closed_form(
    schedule: str,
    pp: int,
    virtual: int,
    microbatches: int,
    dearest: float,
    total: float,
    transfer: float,
    exposed: float,
) -> float:
    """Return the seconds of a step's forwards and backwards in a pipeline.

    `dearest` is the largest of the ranks' times of one microbatch in all of their stages, `total`
    their sum, `transfer` the time of a message, of which the share `exposed` is waited for. 1F1B
    and GPipe: all microbatches on the dearest rank, one on the way through the others,
    arXiv:2006.09503; with v stages a rank the way is v times shorter, arXiv:2104.04473, section
    2.2. A test holds these against the events of the tables.
    """
    if pp == 1:
        return microbatches * dearest
    sends = 2 * virtual * microbatches * transfer * exposed
    if schedule == "naive":
        return microbatches * (total + 2 * (pp - 1) * transfer)
    if schedule in ("1f1b", "gpipe"):
        return microbatches * dearest + (total - dearest) + 2 * (pp - 1) * transfer + sends
    if schedule in ("interleaved_1f1b", "looped_bfs"):
        way = (total - dearest) / virtual + 2 * (pp - 1) * transfer
        return microbatches * dearest + way + sends
    # Zero bubble: only the first forwards wait, a third of a stage's time, arXiv:2401.10241,
    # section 2.3; in a V they do so too where forward and both backwards take equal time.
    # With few microbatches the first one's way through all stages and back is longer still.
    way = (total - dearest) / (3 * virtual)
    through = 2 * total / 3 + dearest / (3 * virtual)
    return max(microbatches * dearest + way, through) + 2 * (pp - 1) * transfer + sends


def _few(schedule: str, pp: int, microbatches: int) -> int:
    """Return a number of microbatches that shows fill, steady state and drain."""
    few = _SIMULATED * pp
    return microbatches if microbatches <= 2 * few else few


def by_events(
    program: Program,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float,
) -> float:
    """Return the seconds from the first action to the last, each stage with its own costs.

    An action starts when its rank is free and what it needs has arrived. Of many microbatches two
    numbers are carried out, and the rest added at the rate between them.
    """
    layout, total = program.layout, program.microbatches
    schedule, pp, virtual = layout.schedule, layout.pp, layout.virtual_stages
    few = _few(schedule, pp, total)
    if few == total:
        return _makespan(schedule, pp, virtual, total, forward, backward, transfer)
    more = few + pp
    first, second = (
        _makespan(schedule, pp, virtual, count, forward, backward, transfer)
        for count in (few, more)
    )
    return first + (second - first) / (more - few) * (total - few)


def _makespan(
    schedule: str,
    pp: int,
    virtual: int,
    microbatches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float,
) -> float:
    tables = compute_tables(schedule, pp, virtual, microbatches)
    ranks_of_stage = stage_ranks(schedule, pp, virtual)
    splits = SCHEDULES[schedule].splits_backward
    last = len(ranks_of_stage) - 1
    clocks = [0.0] * len(tables)
    done: dict[Action, float] = {}

    def step(rank: int, action: Action) -> tuple[Action, int] | None:
        start = clocks[rank]
        for needed in inputs(action, last):
            end = done.get(needed)
            if end is None:
                return needed, ranks_of_stage[needed.stage]
            arrives = end + (transfer if ranks_of_stage[needed.stage] != rank else 0.0)
            start = max(start, arrives)
        cost = forward[action.stage] if action.kind == "F" else backward[action.stage]
        if action.kind in ("I", "W") and splits:
            cost /= 2
        clocks[rank] = start + cost
        for mark in marks(action):
            done[mark] = clocks[rank]
        return None

    simulate(tables, step)
    return max(clocks)
