"""Rows of weights and of gradients through a channel, a few at a time.

As `exchange` sends them by gloo, to the same bits: but rows of gradients are added to their sums
from where the others have left them, and neither what is sent nor what is received has a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.execute.channel import LARGEST
from meshwright.execute.masters import Weight
from meshwright.execute.shared import Left, channel_of, enter


class _RankCut(NamedTuple):
    """A tensor, flat, and which of its elements belong to each rank."""

    whole: Tensor
    cuts: Sequence[slice]


# What goes at a time: of which tensors, and which elements of each rank.
_Turn = list[tuple[int, list[slice]]]


def leave_gradients(
    weights: Sequence[Weight], group: dist.ProcessGroup, rank: int, dtype: torch.dtype
) -> Left:
    """Leave the rows of gradients that belong to others, and add theirs to this rank's sums.

    The sums are there already, with this rank's own rows. `rank` is its place in the group.
    """
    cuts, sums = [], []
    for weight in weights:
        assert weight.gradient is not None
        assert weight.shard_gradient is not None
        cuts.append(_by_rows(weight.gradient, weight.rows))
        sums.append(weight.shard_gradient.view(-1))
    left = sum(len(cut.whole) - _length(cut.cuts[rank]) for cut in cuts)
    entries = [enter("all_to_all", left * dtype.itemsize, group)]  # before: it may wait for others
    return Left(group, _leave_to_owners(cuts, sums, group, rank, dtype, entries), entries)


def leave_weights(weights: Sequence[Weight], group: dist.ProcessGroup, rank: int) -> Left:
    """Leave this rank's rows of weights, and put the others' where they belong."""
    cuts, entries = [_by_rows(weight.memory, weight.rows) for weight in weights], []
    for whole, of in cuts:
        for step in range(1, len(of)):  # entered as gloo sends them
            after, before = (rank + step) % len(of), (rank - step) % len(of)
            for kind, whose, peer in (("send", rank, after), ("recv", before, before)):
                if count := _length(of[whose]):
                    entries.append(enter(kind, count * whole.element_size(), group, peer))
    return Left(group, _leave_to_all(cuts, group, rank, entries), entries)


def _leave_to_owners(
    cuts: Sequence[_RankCut],
    sums: Sequence[Tensor],
    group: dist.ProcessGroup,
    rank: int,
    dtype: torch.dtype,
    entries: Sequence[int],
) -> int:
    """Leave what belongs to others, and add theirs to sums of this rank's; returns the number."""
    channel, number, others = channel_of(group), -1, group.size() - 1
    for turn in _turns(cuts, LARGEST // (others * dtype.itemsize)):
        pieces = [
            cuts[at].whole[cut] for at, of in turn for whose, cut in enumerate(of) if whose != rank
        ]
        each = [sum(_length(of[whose]) for _, of in turn) for whose in range(others + 1)]
        counts = [sum(each) - own for own in each]
        finish = partial(_add, turn, [c.cuts[rank] for c in cuts], sums, rank)
        number = channel.leave_pieces(pieces, dtype, counts, finish, entries)
    return number


def _add(
    turn: _Turn, own: Sequence[slice], sums: Sequence[Tensor], rank: int, parts: Sequence[Tensor]
) -> None:
    """Add what others have left for this rank, which is not all of their parts."""
    for whose, part in enumerate(parts):
        if whose == rank:
            continue
        start = 0
        for at, of in turn:
            mine = of[rank]
            place = (
                start + sum(_length(cut) for cut in of[:rank]) - _length(of[whose]) * (whose < rank)
            )
            first = mine.start - own[at].start
            sums[at][first : first + _length(mine)].add_(part[place : place + _length(mine)])
            start += sum(map(_length, of)) - _length(of[whose])


def _leave_to_all(
    cuts: Sequence[_RankCut], group: dist.ProcessGroup, rank: int, entries: Sequence[int]
) -> int:
    """Leave what belongs to this rank, and take what belongs to others; returns the number."""
    channel, number, dtype = channel_of(group), -1, cuts[0].whole.dtype
    for turn in _turns(cuts, LARGEST // dtype.itemsize):
        pieces = [cuts[at].whole[of[rank]] for at, of in turn]
        counts = [sum(_length(of[whose]) for _, of in turn) for whose in range(group.size())]
        finish = partial(_put, turn, cuts, rank)
        number = channel.leave_pieces(pieces, dtype, counts, finish, entries)
    return number


def _put(turn: _Turn, cuts: Sequence[_RankCut], rank: int, parts: Sequence[Tensor]) -> None:
    for whose, part in enumerate(parts):
        if whose != rank:
            into = [cuts[at].whole[of[whose]] for at, of in turn]
            for room, found in zip(
                into, torch.split(part, [len(one) for one in into]), strict=True
            ):
                room.copy_(found)


def _turns(cuts: Sequence[_RankCut], most: int) -> Iterator[_Turn]:
    """Yield what goes at a time: of each rank so many elements at most."""
    turn: _Turn = []
    left = most
    for at, (_, of) in enumerate(cuts):
        first, longest = 0, max(map(_length, of))
        while first < longest:
            stop = min(first + left, longest)
            turn.append(
                (at, [slice(min(o.start + first, o.stop), min(o.start + stop, o.stop)) for o in of])
            )
            left -= stop - first
            first = stop
            if not left:
                yield turn
                turn, left = [], most
    if turn:
        yield turn


def _by_rows(tensor: Tensor, rows: Sequence[slice]) -> _RankCut:
    size = math.prod(tensor.shape[1:])
    return _RankCut(tensor.view(-1), [slice(own.start * size, own.stop * size) for own in rows])


def _length(elements: slice) -> int:
    return int(elements.stop - elements.start)
