"""Pipeline schedules: the order in which each rank computes, as tables of actions.

A table is plain data, so that a schedule can be drawn, timed and checked before anything runs.
`compute_tables` makes the computing part, `transfers` adds and checks the messages, `timing`
computes the cost of a schedule. Import all of them from this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Final, cast

from meshwright.layout.schedules import SCHEDULES, microbatch_rule
from meshwright.program.actions import Action, Kind, ProgramError, Table
from meshwright.program.timing import Ordered, bubble_fraction, order_of, peak_in_flight
from meshwright.program.transfers import check_order, with_transfers

__all__ = [
    "KEPT_TABLES",
    "SCHEDULES",
    "Action",
    "Kind",
    "ProgramError",
    "Table",
    "bubble_fraction",
    "check_order",
    "compute_order",
    "compute_tables",
    "microbatch_rule",
    "peak_in_flight",
    "stage_ranks",
    "with_transfers",
]

# Work that a rank repeats: how many times, and which actions ("F B": a forward, then a backward).
Phrase = tuple[int, str]

# So many sets of tables are kept for layouts that have the same pipeline.
KEPT_TABLES: Final = 32
_KEPT_ORDERS: Final = 8

# Forwards by which a rank is ahead of the next one when the backwards begin.
_LEAD: Final[Mapping[str, int]] = {"1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 1}


def stage_ranks(schedule: str, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage.

    Stages go round the ranks, or for a V down and up again: 0 1 2 2 1 0.
    """
    is_v = SCHEDULES[schedule].is_v
    down = range(pp)
    turns = (down[::-1] if is_v and turn % 2 else down for turn in range(virtual_stages))
    return tuple(chain.from_iterable(turns))


@lru_cache(maxsize=KEPT_TABLES)
def compute_tables(
    schedule: str, pp: int, virtual_stages: int, microbatches: int
) -> tuple[Table, ...]:
    """Return each pipeline rank's computing actions, in order.

    The orders are those of torch.distributed.pipelining 2.13; "naive" has one microbatch at a time
    in the whole pipeline. A single stage processes one microbatch after the other with every
    schedule. Raises `ProgramError` if `microbatch_rule` forbids the number of microbatches.
    """
    return tuple(
        compute_table(schedule, pp, virtual_stages, microbatches, rank) for rank in range(pp)
    )


def compute_table(
    schedule: str, pp: int, virtual_stages: int, microbatches: int, rank: int
) -> Table:
    """Return the computing actions of one pipeline rank: see `compute_tables`."""
    broken = microbatch_rule(schedule, pp, virtual_stages, microbatches)
    if broken:
        raise ProgramError(broken)
    if pp == virtual_stages == 1:
        schedule = "naive"
    if SCHEDULES[schedule].is_v:
        return _v_table(schedule, pp, microbatches, rank)
    return _looped_table(schedule, pp, virtual_stages, microbatches, rank)


@lru_cache(maxsize=_KEPT_ORDERS)
def compute_order(
    schedule: str, pp: int, virtual_stages: int, microbatches: int
) -> tuple[Ordered, ...]:
    """Return the actions of all ranks' `compute_tables` in an order in which they can run: see
    `order_of`."""
    pipeline = schedule, pp, virtual_stages
    return order_of(compute_tables(*pipeline, microbatches), stage_ranks(*pipeline))


def _looped_table(
    schedule: str, pp: int, virtual_stages: int, microbatches: int, rank: int
) -> Table:
    """Return the table of a rank that starts with forwards, then alternates one forward and one
    backward.

    GPipe (arXiv:1811.06965), 1F1B (PipeDream-Flush, arXiv:2006.09503), interleaved 1F1B
    (arXiv:2104.04473), breadth-first (arXiv:2211.05953) and ZB1P (arXiv:2401.10241) differ in the
    order of the microbatches and in how many forwards come first. In zero bubble, weight gradients
    lag behind, by one more on each rank, to fill the end of the pipeline.
    """
    is_breadth_first = schedule == "looped_bfs"
    is_one_round = is_breadth_first or virtual_stages == 1
    size = microbatches if is_one_round else microbatches // max(1, microbatches // pp)
    forward, backward = list[Action](), list[Action]()
    for start in range(0, microbatches, size):
        batch = range(start, start + size)
        for turn in range(virtual_stages):
            forward += (Action("F", turn * pp + rank, index) for index in batch)
        for turn in reversed(range(virtual_stages)):
            order = reversed(batch) if is_breadth_first else batch
            backward += (Action("B", turn * pp + rank, index) for index in order)
    total = len(forward)
    if schedule in _LEAD:
        first = min((virtual_stages - 1) * size + _LEAD[schedule] * (pp - 1 - rank), total)
    else:
        first = 0 if schedule == "naive" else total
    steady = total - first
    phrases: list[Phrase] = [(first, "F"), (steady, "F B"), (first, "B")]
    if SCHEDULES[schedule].splits_backward:
        lag = min(rank, total)
        early = min(lag, steady)  # of the lag, how much falls before the last forward
        late = lag - early
        phrases = [(first, "F"), (early, "F I"), (steady - early, "F I W")]
        phrases += [(late, "I"), (first - late, "I W"), (lag, "W")]
    return _spell(phrases, [(forward, backward)])


def _v_table(schedule: str, pp: int, microbatches: int, rank: int) -> Table:
    """Return the table of a rank with two stages, "0" on the way down and "1" on the way up.

    ZB-V: arXiv:2401.10241, section 6. With few microbatches it leaves out the rest of the 2 pp - 1
    that fill the pipeline. DualPipeV: the half of DualPipe (arXiv:2412.19437, section 3.2.1) that
    remains when both directions share their weights; steps as in github.com/deepseek-ai/DualPipe.
    """
    above, below = rank + 1, pp - 1 - rank  # ranks down to here, ranks after
    if schedule == "zbv":
        count = max(2 * pp - 1, microbatches)
        phrases = [
            (2 * below + 1, "F0"),
            (rank, "F1 F0"),
            (below + 1, "F1 I1 W1"),
            (count - 2 * pp + 1 + rank, "F0 I0 W0 F1 I1 W1"),
            (below, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (below + 1, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ]
    else:
        count = microbatches
        phrases = [
            (2 * below, "F0"),
            (above, "F0 F1"),
            (below, "I1 W F1"),
            (count - 2 * pp + above, "F0 B1 F1 B0"),
            (below, "B1 F1 B0"),
            # Twice `above` backwards, of which the second half leaves the weights for later.
            (above // 2, "B1 B0"),
            (above % 2, "B1 I0"),
            (above // 2, "I1 I0"),
            (below, "W I0"),
            (above, "W"),
        ]
    chunks = [
        tuple([Action(kind, stage, index) for index in range(count)] for kind in ("F", "B"))
        for stage in (rank, 2 * pp - 1 - rank)
    ]
    table = _spell(phrases, chunks)
    return tuple(action for action in table if action.microbatch < microbatches)


def _spell(phrases: Iterable[Phrase], chunks: Sequence[Sequence[Sequence[Action]]]) -> Table:
    """Return the table that repeated phrases stand for.

    A chunk is a pair: the forwards in their order, and the backwards. "F1" takes the next forward
    of chunk 1, "B1" and "I1" its next backward; the number may be left out for chunk 0. "W1" takes
    the oldest backward of chunk 1 whose weights' part is still to do, "W" the oldest of all.
    """
    forwards, backwards = (
        [iter(actions) for actions in side] for side in zip(*chunks, strict=True)
    )
    table: list[Action] = []
    deferred: list[tuple[str, Action]] = []
    for token in chain.from_iterable(phrase.split() * times for times, phrase in phrases):
        kind, chunk = cast(Kind, token[0]), token[1:]
        if kind == "W":
            oldest = next(entry for entry in deferred if chunk in ("", entry[0]))
            deferred.remove(oldest)
            action = oldest[1]
        else:
            action = next((forwards if kind == "F" else backwards)[int(chunk or 0)])
        if kind == "I":
            deferred.append((chunk, action))
        table.append(action if kind == action.kind else Action(kind, *action[1:]))
    return tuple(table)
