"""Rows of weights and of gradients through a lane, a few at a time.

As `exchange` sends them by gloo, to the same bits: but rows of gradients are added to their sums
from where the others have left them, and neither what is sent nor what is received has a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.execute.lane import LARGEST
from meshwright.execute.masters import Weight
from meshwright.execute.shared import Left, enter, lane_of


def fits(weights: Sequence[Weight], dtype: torch.dtype) -> bool:
    """Whether a row of each weight for all ranks is no more than a message may be."""
    return all(_row(w) * len(w.rows) * dtype.itemsize <= LARGEST for w in weights)


def leave_gradients(
    weights: Sequence[Weight], group: dist.ProcessGroup, rank: int, dtype: torch.dtype
) -> Left:
    """Leave the rows of gradients that belong to others, and add theirs to this rank's sums.

    The sums are there already, with this rank's own rows. `rank` is its place in the group.
    """
    lane, number, total = lane_of(group), -1, 0
    for weight in weights:
        gradient = weight.gradient
        assert gradient is not None
        for rows in _turns(weight, len(weight.rows), dtype):
            pieces = [gradient[some] for at, some in enumerate(rows) if at != rank]
            each = [_length(some) * _row(weight) for some in rows]
            counts = [sum(each) - own for own in each]
            number = lane.leave_pieces(
                pieces, dtype, counts, partial(_add, weight, rows, each, rank)
            )
            total += counts[rank]
    return Left(group, number, [enter("all_to_all", total * dtype.itemsize, group)])


def _add(
    weight: Weight, rows: Sequence[slice], each: Sequence[int], rank: int, parts: Sequence[Tensor]
) -> None:
    """Add what others have left for this rank's rows: of a part those that are its own."""
    found, first = weight.shard_gradient, weight.rows[rank].start
    assert found is not None
    sums = found[rows[rank].start - first : rows[rank].stop - first]
    for at, part in enumerate(parts):
        if at != rank:
            start = sum(each[:rank]) - each[at] * (at < rank)
            sums.add_(part[start : start + each[rank]].view(sums.shape))


def leave_weights(weights: Sequence[Weight], group: dist.ProcessGroup, rank: int) -> Left:
    """Leave this rank's rows of weights, and put the others' where they belong."""
    lane, number = lane_of(group), -1
    entries: list[int] = []
    for weight in weights:
        ranks, size = len(weight.rows), _row(weight) * weight.used.dtype.itemsize
        for step in range(1, ranks):  # entered as gloo sends them
            after, before = (rank + step) % ranks, (rank - step) % ranks
            for kind, whose, peer in (("send", rank, after), ("recv", before, before)):
                if bytes_ := _length(weight.rows[whose]) * size:
                    entries.append(enter(kind, bytes_, group, peer))
        for rows in _turns(weight, 1, weight.used.dtype):
            counts = [_length(some) * _row(weight) for some in rows]
            pieces = [weight.memory[rows[rank]]]
            number = lane.leave_pieces(
                pieces, weight.used.dtype, counts, partial(_put, weight, rows, rank)
            )
    return Left(group, number, entries)


def _put(weight: Weight, rows: Sequence[slice], rank: int, parts: Sequence[Tensor]) -> None:
    for at, part in enumerate(parts):
        if at != rank:
            into = weight.memory[rows[at]]
            into.copy_(part.view(into.shape))


def _turns(weight: Weight, copies: int, dtype: torch.dtype) -> Iterator[list[slice]]:
    """Yield the rows of each rank that go at a time: copies of them are a message at most."""
    most = LARGEST // (copies * max(_row(weight), 1) * dtype.itemsize)
    for first in range(0, max(map(_length, weight.rows)), most):
        yield [
            slice(min(own.start + first, own.stop), min(own.start + first + most, own.stop))
            for own in weight.rows
        ]


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _row(weight: Weight) -> int:
    """Return the elements of a row."""
    return math.prod(weight.memory.shape[1:])
