"""Simulates action tables: start and end times, idle time, and activations in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from meshwright.program.actions import Action, ProgramError, Table, completed, inputs, is_sent

# Does an action, or returns what it waits for and the rank that has to do it.
Step = Callable[[int, Action], tuple[Action, int] | None]


def simulate(tables: Sequence[Table], step: Step) -> None:
    """Advance all ranks through their tables, each as far as it can without the others.

    `step` performs an action of a rank, or returns the action that it waits for and that one's
    rank. Raises `ProgramError` with the ranks that wait for each other when none can advance.
    """
    places = [0] * len(tables)
    has_moved = True
    waits: dict[int, tuple[Action, int]] = {}
    while has_moved:
        has_moved = False
        waits.clear()
        for rank, table in enumerate(tables):
            while places[rank] < len(table):
                wait = step(rank, table[places[rank]])
                if wait is not None:
                    waits[rank] = wait
                    break
                places[rank] += 1
                has_moved = True
    if waits:
        raise ProgramError(f"the pipeline stands still: {_chain(tables, places, waits)}")


def _chain(
    tables: Sequence[Table], places: Sequence[int], waits: Mapping[int, tuple[Action, int]]
) -> str:
    """Return a text that says which rank waits for which, until the cycle closes or at a rank that
    ended."""
    path, rank = list[int](), next(iter(waits))
    while rank in waits and rank not in path:
        path.append(rank)
        rank = waits[rank][1]
    links = []
    for waiter in path[path.index(rank) :] if rank in path else path:
        place, (awaited, peer) = places[waiter], waits[waiter]
        ended = "" if peer in waits else ", which has ended"
        links.append(
            f"rank {waiter}, position {place}: {tables[waiter][place]} waits for {awaited} "
            f"from rank {peer}{ended}"
        )
    return "; ".join(links)


def times(
    tables: Sequence[Table],
    ranks_of_stage: Sequence[int],
    seconds: Callable[[Action], float],
    transfer: float = 0.0,
    exposed: float = 0.0,
) -> dict[Action, tuple[float, float]]:
    """Return the start and end in seconds of each computing action, if each starts as soon as it
    can.

    It starts when its rank is free and its inputs have arrived: from another rank, `transfer`
    seconds after they were computed. A rank is busy for the first `exposed` seconds of each send.
    The actions are in the order of the simulation, those of one rank in the order of its table,
    whose own transfers are ignored. Raises `ProgramError` if the order cannot run.
    """
    return times_in(order_of(tables, ranks_of_stage), seconds, transfer, exposed)


class Ordered(NamedTuple):
    """A computing action in the order of a simulation, which does not depend on its cost.

    `awaits` has the indices in the order of the actions on other ranks that it waits for.
    `is_sent`: its result goes to another rank.
    """

    action: Action
    rank: int
    awaits: tuple[int, ...]
    is_sent: bool


def order_of(tables: Sequence[Table], ranks_of_stage: Sequence[int]) -> tuple[Ordered, ...]:
    """Return the computing actions of all ranks in one order, each after those that it waits for.

    Raises `ProgramError` if there is none.
    """
    last = len(ranks_of_stage) - 1
    places: dict[Action, int] = {}
    ordered: list[Ordered] = []

    def step(rank: int, action: Action) -> tuple[Action, int] | None:
        if action.is_transfer:
            return None
        awaits: tuple[int, ...] = ()
        for needed in inputs(action, last):
            place, peer = places.get(needed), ranks_of_stage[needed.stage]
            if place is None:
                return needed, peer
            if peer != rank:
                awaits = (*awaits, place)
        for done in completed(action):
            places[done] = len(ordered)
        ordered.append(Ordered(action, rank, awaits, is_sent(action, ranks_of_stage)))
        return None

    simulate(tables, step)
    return tuple(ordered)


def times_in(
    order: Sequence[Ordered],
    seconds: Callable[[Action], float],
    transfer: float = 0.0,
    exposed: float = 0.0,
) -> dict[Action, tuple[float, float]]:
    """Return the `times` of actions that `order_of` has ordered."""
    clocks = [0.0] * (1 + max((entry.rank for entry in order), default=0))
    ends: list[float] = []
    intervals: dict[Action, tuple[float, float]] = {}
    for action, rank, awaits, is_heard in order:
        start = clocks[rank]
        for place in awaits:
            start = max(start, ends[place] + transfer)
        end = start + seconds(action)
        intervals[action] = start, end
        ends.append(end)
        clocks[rank] = end + exposed if is_heard else end
    return intervals


def end_times(
    tables: Sequence[Table], ranks_of_stage: Sequence[int], costs: Mapping[str, float]
) -> dict[Action, float]:
    """Return the second at which each action ends, in the order of `times`; `costs` are by kind,
    transfers are free."""
    intervals = times(tables, ranks_of_stage, lambda action: costs[action.kind])
    return {done: end for action, (_, end) in intervals.items() for done in completed(action)}


def bubble_fraction(
    tables: Sequence[Table],
    ranks_of_stage: Sequence[int],
    forward_s: float = 1.0,
    input_s: float = 1.0,
    weight_s: float = 1.0,
) -> float:
    """Return the share of the ranks' time that is idle, from the first action to the end of the
    last.

    Costs are in seconds per action of one stage: F, I and W; B takes those of I and W. Transfers,
    which the tables may have or lack, are free. Raises `ProgramError` if the order cannot be run.
    """
    costs = {"F": forward_s, "I": input_s, "W": weight_s, "B": input_s + weight_s}
    busy = sum(costs.get(action.kind, 0.0) for table in tables for action in table)
    makespan = max(end_times(tables, ranks_of_stage, costs).values(), default=0.0)
    return 1 - busy / (len(tables) * makespan) if makespan else 0.0


def peak_in_flight(table: Table) -> int:
    """Return the most activations, each of one stage and microbatch, that a rank holds at a time.

    F adds one; B, or W after I, frees it. I frees none, since W still needs the inputs of all
    matmuls; this is the memory cost of a zero-bubble schedule.
    """
    count = peak = 0
    for action in table:
        count += (action.kind == "F") - (action.kind in ("B", "W"))
        peak = max(peak, count)
    return peak
