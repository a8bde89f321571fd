"""The time of a pipeline: in closed form for a search, and by simulating the action table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES
from meshwright.program.actions import Action
from meshwright.program.schedule import compute_order, compute_table
from meshwright.program.timing import times_in

# Microbatches that are carried out on paper; a pipeline's further ones each add the same.
_SIMULATED = 4


def closed_form(
    schedule: str,
    pp: int,
    virtual: int,
    microbatches: int,
    slowest: float,
    total: float,
    transfer: float,
    exposed: float,
) -> float:
    """Return the seconds of all forwards and backwards of a step in a pipeline.

    `slowest` is the largest of the ranks' times of one microbatch in all of their stages, `total`
    their sum, `transfer` the time of a message, of which the share `exposed` is not hidden. 1F1B
    and GPipe: all microbatches on the slowest rank, plus one through the other ranks,
    arXiv:2006.09503; with v stages per rank, the latter is v times shorter, arXiv:2104.04473,
    section 2.2. A test compares this with the events of the tables.
    """
    if pp == 1:
        return microbatches * slowest
    sends = 2 * virtual * microbatches * transfer * exposed
    if schedule == "naive":
        return microbatches * (total + 2 * (pp - 1) * transfer)
    if schedule in ("1f1b", "gpipe"):
        return microbatches * slowest + (total - slowest) + 2 * (pp - 1) * transfer + sends
    if schedule in ("interleaved_1f1b", "looped_bfs"):
        way = (total - slowest) / virtual
        # Few microbatches leave ranks idle while the first one goes through all stages and back.
        return max(microbatches * slowest + way, total) + 2 * (pp - 1) * transfer + sends
    # Zero bubble: only the first forwards wait, a third of a stage's time, arXiv:2401.10241,
    # section 2.3; in a V they do so too where forward and both backwards take equal time.
    # With few microbatches the first one's way through all stages and back is longer still.
    way = (total - slowest) / (3 * virtual)
    through = 2 * total / 3 + slowest / (3 * virtual)
    return max(microbatches * slowest + way, through) + 2 * (pp - 1) * transfer + sends


def in_flight(layout: Layout, rank: int, microbatches: int) -> float:
    """Return how many activations, of one stage and microbatch each, a pipeline rank holds at most.

    They are held until the weight gradients. In closed form; a test compares it with the peaks of
    the action tables.
    """
    pp, virtual = layout.pp, layout.virtual_stages
    if pp == 1:
        return 1.0
    if layout.schedule == "1f1b":
        return float(min(pp - rank, microbatches))
    if layout.schedule == "naive":
        return 1.0
    if SCHEDULES[layout.schedule].holds_all:
        return float(virtual * microbatches)
    if layout.schedule == "interleaved_1f1b":  # arXiv:2104.04473, section 2.2
        return float(min((virtual - 1) * pp + 2 * (pp - 1 - rank) + 1, virtual * microbatches))
    # Weights' gradients wait, and so do their inputs: arXiv:2401.10241; arXiv:2412.19437, table 2.
    limit = pp * virtual + (layout.schedule == "dualpipev")
    return float(min(limit, virtual * microbatches))


def least_in_flight(layout: Layout, microbatches: int) -> float:
    """Return a lower bound of the activations that rank 0 holds when it holds most, each of one
    stage and microbatch, whatever the size of what deferred weight gradients hold.

    Ranks of a V hold fewer than `in_flight` if there are few microbatches: those of its table.
    """
    order = layout.schedule, layout.pp, layout.virtual_stages
    if layout.pp == 1 or not SCHEDULES[layout.schedule].is_v:
        return in_flight(layout, 0, microbatches)
    return float(max(flight for flight, _ in held_together(*order, 0, microbatches)))


@lru_cache(maxsize=8192)
def held_together(
    schedule: str, pp: int, virtual: int, rank: int, microbatches: int
) -> tuple[tuple[int, int], ...]:
    """Return the largest pairs (activations in flight, deferred weight gradients) of a rank's
    table.

    Each counts one stage and microbatch: in flight from its forward to the input gradients of its
    backward, deferred from these to its weight gradients. No other moment of the table has more of
    both than one of these pairs.
    """
    flight = deferred = 0
    pairs = set[tuple[int, int]]()
    for action in compute_table(schedule, pp, virtual, _few(pp, microbatches), rank):
        flight += (action.kind == "F") - (action.kind in ("B", "I"))
        deferred += (action.kind == "I") - (action.kind == "W")
        pairs.add((flight, deferred))
    return tuple(
        (flight, deferred)
        for flight, deferred in sorted(pairs)
        if not any(
            flight <= other[0] and deferred <= other[1] and (flight, deferred) != other
            for other in pairs
        )
    )


def _few(pp: int, microbatches: int) -> int:
    """Return a smaller number of microbatches that still has fill, steady state and drain."""
    few = _SIMULATED * pp
    return microbatches if microbatches <= 2 * few else few


class Costs(NamedTuple):
    """Seconds of a pipeline's work: forward and backward of each stage, and a message between
    stages.

    A rank waits for the share `exposed` of what it sends. `head` is the head's part of the last
    stage's backward; if the backward is split, it belongs to the part for inputs.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    transfer: float = 0.0
    exposed: float = 0.0
    head: float = 0.0


def action_times(
    layout: Layout, microbatches: int, costs: Costs
) -> dict[Action, tuple[float, float]]:
    """Return the start and end in seconds of each action of a step, from the costs of each stage.

    Both the price and predicted timelines use it: `program.timing.times_in`.
    """
    schedule, pp, virtual = layout.schedule, layout.pp, layout.virtual_stages
    splits = SCHEDULES[schedule].splits_backward
    forward, backward, transfer, exposed, head = costs
    last = pp * virtual - 1

    def seconds(action: Action) -> float:
        if action.kind == "F":
            return forward[action.stage]
        stage_seconds = backward[action.stage]
        if not splits or action.kind == "B":
            return stage_seconds
        at_once = head if action.stage == last else 0.0
        return (stage_seconds - at_once) / 2 + at_once * (action.kind == "I")

    order = compute_order(schedule, pp, virtual, microbatches)
    return times_in(order, seconds, transfer, exposed * transfer)


def by_events(layout: Layout, microbatches: int, costs: Costs) -> float:
    """Return the seconds from the first action to the end of the last, by simulating the schedule.

    See `action_times`. Of more microbatches than a few per stage, two smaller numbers are simulated
    and extrapolated linearly. In those, the slowest rank may not yet set the pace, so the result is
    at least that rank's time without any waiting.
    """
    few = _few(layout.pp, microbatches)
    first = action_times(layout, few, costs)
    makespan = _end(first)
    if few == microbatches:
        return makespan
    added = (_end(action_times(layout, few + layout.pp, costs)) - makespan) / layout.pp
    lower_bound = _least(layout, costs, first, few, microbatches)
    return max(makespan + added * (microbatches - few), lower_bound)


def _end(times: Mapping[Action, tuple[float, float]]) -> float:
    return max(end for _, end in times.values())


def _least(
    layout: Layout,
    costs: Costs,
    times: Mapping[Action, tuple[float, float]],
    few: int,
    microbatches: int,
) -> float:
    """Return a lower bound of a step: the longest time of a rank that never waits between its
    actions.

    `times` are those of a step with `few` microbatches. They show when ranks start, how long before
    the end of the step they finish, and how long they are busy per microbatch.
    """
    sent = costs.exposed * costs.transfer
    starts, ends, busy = dict[int, float](), dict[int, float](), dict[int, float]()
    for entry in compute_order(layout.schedule, layout.pp, layout.virtual_stages, few):
        start, end = times[entry.action]
        end += sent * entry.is_sent
        starts.setdefault(entry.rank, start)
        busy[entry.rank] = busy.get(entry.rank, 0.0) + end - start
        ends[entry.rank] = end
    last = _end(times)
    return max(starts[rank] + busy[rank] / few * microbatches + last - ends[rank] for rank in busy)
