"""The transfers of a pipeline: adds them to tables of computing actions, and checks tables."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

from meshwright.program.actions import (
    Action,
    ProgramError,
    Table,
    completed,
    inputs,
    receives,
    sends,
)
from meshwright.program.timing import end_times, simulate

# How many computing actions ahead of its use a transfer is received, see `with_transfers`.
RECEIVE_AHEAD: Final = 1
# Costs by which `with_transfers` finds out what is ready first.
UNIT_COSTS: Final[Mapping[str, float]] = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}


def with_transfers(tables: Sequence[Table], ranks_of_stage: Sequence[int]) -> tuple[Table, ...]:
    """Return the tables with the transfers between stages on different ranks added.

    Takes compute tables, also of forwards alone. Both ranks of a pair have its transfers, both
    directions together, in the same order, as NCCL requires: the order in which their contents are
    ready if F, I and W take equal time and B twice that, so that no transfer delays one whose
    content is ready earlier. A SEND comes right after the action that computes its content. A RECV
    comes before the computing action before the one that needs it (`RECEIVE_AHEAD`): late, because
    each posted RECV holds a buffer, but early enough that the transfer overlaps with computation.
    The pair's order may move it earlier. Raises `ProgramError` for an order in which ranks
    deadlock.
    """
    ends = end_times(tables, ranks_of_stage, UNIT_COSTS)
    queues: dict[tuple[int, int], deque[Action]] = {}
    # Clocks only go forward, so that the SENDs of a rank keep their order. Of transfers that are
    # ready at the same time any may be first: both sides take them from this one list.
    for done in sorted(ends, key=ends.__getitem__):
        sent = sends(done, ranks_of_stage)
        if sent is not None:
            send, receive, peer = sent
            rank = ranks_of_stage[done.stage]
            queues.setdefault((rank, peer), deque()).append(send)
            queues.setdefault((peer, rank), deque()).append(receive)
    return tuple(_merge(rank, table, ranks_of_stage, queues) for rank, table in enumerate(tables))


def with_own_transfers(table: Table, ranks_of_stage: Sequence[int]) -> Table:
    """Return one rank's table with each transfer next to its action.

    A pipeline cannot run in this order, because it ignores the other ranks; the messages are the
    same.
    """
    actions: list[Action] = []
    for action in table:
        received, sent = receives(action, ranks_of_stage), sends(action, ranks_of_stage)
        actions += [received[0]] if received is not None else []
        actions.append(action)
        actions += [sent[0]] if sent is not None else []
    return tuple(actions)


def _merge(
    rank: int,
    table: Table,
    ranks_of_stage: Sequence[int],
    queues: Mapping[tuple[int, int], deque[Action]],
) -> Table:
    """Return a rank's table with the transfers of its queues added, of which it has one per
    peer."""
    merged: list[Action] = []
    posted: set[Action] = set()

    def post(until: Action, peer: int) -> None:
        """Post the pair's transfers up to `until`, or up to a SEND whose content is not computed
        yet."""
        queue = queues[rank, peer]
        while until not in posted and (queue[0] == until or queue[0].kind.startswith("RECV")):
            posted.add(queue[0])
            merged.append(queue.popleft())

    needed = [receives(action, ranks_of_stage) for action in table]
    for place, action in enumerate(table):
        for receive in needed[place : place + 1 + RECEIVE_AHEAD]:
            if receive is not None and receive[0] not in posted:
                post(*receive)
        merged.append(action)
        sent = sends(action, ranks_of_stage)
        if sent is not None:
            post(sent[0], sent[2])
    return tuple(merged)


class _Posted(NamedTuple):
    """A transfer in a rank's table: its index, the action there, and the RECV of the same
    transfer."""

    place: int
    action: Action
    transfer: Action


# The transfers of each rank with each peer, in the rank's order.
_Orders = Mapping[tuple[int, int], Sequence[_Posted]]


def check_order(tables: Sequence[Table], ranks_of_stage: Sequence[int]) -> None:
    """Check tables with transfers for all that a run needs; a pass means that it cannot hang.

    Every stage does F of every microbatch once, then B once, or I and then W. The inputs of an
    action have arrived on its rank. The transfers of a pair of ranks match one by one. And all
    ranks finish if a transfer takes place only when both sides have reached it and all earlier
    transfers of the pair are done, and only a computing action waits, for the RECV that it needs.
    The microbatches are those up to the highest number found. Raises `ProgramError` with rank,
    position and action.
    """
    ranks = 1 + max(ranks_of_stage)
    if len(tables) != ranks:
        raise ProgramError(f"there are {len(tables)} tables, but the stages lie on {ranks} ranks")
    highest = max((action.microbatch for action in chain.from_iterable(tables)), default=0)
    for rank, table in enumerate(tables):
        _check_table(rank, table, ranks_of_stage, highest + 1)
    orders = _orders(tables, ranks_of_stage)
    _check_pairs(orders)
    _check_progress(tables, ranks_of_stage, orders)


def _check_table(rank: int, table: Table, ranks_of_stage: Sequence[int], microbatches: int) -> None:
    """Check one rank's table by itself: that it is complete, and that each action comes after those
    it needs."""
    expected = set(_expected(rank, ranks_of_stage, microbatches))
    done: set[Action] = set()
    for place, action in enumerate(table):
        where = f"rank {rank}, position {place}: {action}"
        results = completed(action)
        if not expected.issuperset(results):
            raise ProgramError(f"{where} does not belong on this rank")
        if not done.isdisjoint(results):
            raise ProgramError(f"{where} has been done before")
        for needed in _needed_here(action, ranks_of_stage):
            if needed not in done:
                raise ProgramError(f"{where} needs {needed}, which has not come before it")
        done.update(results)
    missing = sorted(expected - done, key=lambda a: (a.microbatch, a.stage, a.kind))
    if missing:
        first = missing[0]
        if first.kind == "I":  # and its W: without any backward
            first = first._replace(kind="B")
        raise ProgramError(f"rank {rank}, position {len(table)}: the table ends without {first}")


def _expected(rank: int, ranks_of_stage: Sequence[int], microbatches: int) -> Iterator[Action]:
    """Yield the actions that a rank must perform; a whole backward counts as its two parts."""
    for stage in (s for s, owner in enumerate(ranks_of_stage) if owner == rank):
        for index in range(microbatches):
            yield Action("W", stage, index)
            for action in (Action("F", stage, index), Action("I", stage, index)):
                yield action
                send, receive = sends(action, ranks_of_stage), receives(action, ranks_of_stage)
                if send is not None:
                    yield send[0]
                if receive is not None:
                    yield receive[0]


def _needed_here(action: Action, ranks_of_stage: Sequence[int]) -> Iterator[Action]:
    """Yield the actions that must come before an action in the table of its own rank."""
    kind, stage, index = action
    if kind in ("SEND_F", "SEND_B"):
        yield Action("F" if kind == "SEND_F" else "I", stage, index)
    elif not action.is_transfer:
        rank = ranks_of_stage[stage]
        yield from (
            needed
            for needed in inputs(action, len(ranks_of_stage) - 1)
            if ranks_of_stage[needed.stage] == rank
        )
        receive = receives(action, ranks_of_stage)
        if receive is not None:
            yield receive[0]


def _orders(tables: Sequence[Table], ranks_of_stage: Sequence[int]) -> _Orders:
    orders: dict[tuple[int, int], list[_Posted]] = {}
    for rank, table in enumerate(tables):
        for place, action in enumerate(table):
            if action.is_transfer:
                posted = _Posted(place, action, _as_received(action))
                orders.setdefault((rank, _peer(action, ranks_of_stage)), []).append(posted)
    return orders


def _as_received(action: Action) -> Action:
    """Return the RECV of a transfer: of a SEND, the matching one on the other rank."""
    if action.kind == "SEND_F":
        return Action("RECV_F", action.stage + 1, action.microbatch)
    if action.kind == "SEND_B":
        return Action("RECV_B", action.stage - 1, action.microbatch)
    return action


def _peer(action: Action, ranks_of_stage: Sequence[int]) -> int:
    """Return the other rank of a transfer."""
    is_with_next = action.kind in ("SEND_F", "RECV_B")
    return ranks_of_stage[action.stage + (1 if is_with_next else -1)]


def _check_pairs(orders: _Orders) -> None:
    """Check that the transfers of each pair of ranks are the same on both sides, one by one."""
    for (rank, peer), order in orders.items():
        for count, (entry, peer_entry) in enumerate(zip(order, orders[peer, rank], strict=True)):
            if entry.transfer != peer_entry.transfer:
                raise ProgramError(
                    f"rank {rank}, position {entry.place}: {entry.action} is transfer {count} with "
                    f"rank {peer}, which has {peer_entry.action} there (its position "
                    f"{peer_entry.place})"
                )


def _check_progress(
    tables: Sequence[Table], ranks_of_stage: Sequence[int], orders: _Orders
) -> None:
    """Check by simulation that all ranks reach their ends; see `check_order` for the rules."""
    turns = {
        posted.transfer: turn for order in orders.values() for turn, posted in enumerate(order)
    }
    reached: Counter[tuple[int, int]] = Counter()

    def step(rank: int, action: Action) -> tuple[Action, int] | None:
        if action.is_transfer:
            reached[rank, _peer(action, ranks_of_stage)] += 1
            return None
        awaited = receives(action, ranks_of_stage)
        if awaited is not None:
            receive, peer = awaited
            if min(reached[rank, peer], reached[peer, rank]) <= turns[receive]:
                return awaited
        return None

    simulate(tables, step)
