"""Collectives through a `Lane`, as operators like torch's functional ones.

`torch.ops.meshwright_lane` has some of `torch.ops._c10d_functional`, with their arguments and
meaning: what begins gives a tensor that is filled once `wait_tensor` returns. As operators they are
seen by what records messages and by what chooses the results that recomputation keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.execute.lane import LARGEST, Finish, Lane, open_lane
from meshwright.execute.ledger import Ledger

SPACE: Final = "meshwright_lane"
_SCHEMAS: Final = (
    "all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor",
    "all_reduce_(Tensor input, str reduce_op, str group_name) -> Tensor",
    "all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor",
    "reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name) -> Tensor",
    "all_to_all_single(Tensor input, int group_size, str group_name) -> Tensor",
    "pass_on(Tensor input, str group_name) -> Tensor",
    "wait_tensor(Tensor input) -> Tensor",
)
_REDUCTIONS: Final[Mapping[str, Callable[..., Tensor]]] = {"sum": torch.add, "max": torch.maximum}


@dataclass
class _Open:
    """A group's lane, and where its collectives are entered."""

    group: dist.ProcessGroup
    lane: Lane
    ledger: Ledger
    rank: int
    ranks: tuple[int, ...]
    number: int


@dataclass
class _Process:
    """What a process has: lanes by the names of groups, and what was begun by its memory."""

    lanes: dict[str, _Open] = field(default_factory=dict)
    begun: dict[int, tuple[_Open, int, tuple[int, ...]]] = field(default_factory=dict)


def share(group: dist.ProcessGroup, ledger: Ledger, timeout_s: float) -> bool:
    """Open a lane for a gloo group, unless there is one; whether it has one. A collective."""
    name, known = group.group_name, _process().lanes
    if name not in known or known[name].group is not group:  # names come again with new worlds
        lane = open_lane(group, timeout_s)
        if lane is None:
            return False
        ranks = tuple(dist.get_process_group_ranks(group))
        number = ledger.group(name, ranks)
        known[name] = _Open(group, lane, ledger, dist.get_rank(group), ranks, number)
    return True


def lane_of(message: Tensor, *, is_shared: bool) -> Any:
    """Return the operators of lanes where a message goes by them, else None.

    Every rank must ask with as large a message. Code that is being compiled has torch's.
    """
    size = message.numel() * message.element_size()
    if is_shared and 0 < size <= LARGEST and not torch.compiler.is_compiling():
        return getattr(torch.ops, SPACE)
    return None


def operators(message: Tensor, *, is_shared: bool) -> Any:
    """Return the operators that a message goes by: a lane's or torch's functional ones."""
    return lane_of(message, is_shared=is_shared) or torch.ops._c10d_functional


def _all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    return _reduce(x, torch.empty_like(x), op, group)


def _all_reduce_(x: Tensor, op: str, group: str) -> Tensor:
    return _reduce(x, x, op, group)


def _reduce(x: Tensor, out: Tensor, op: str, group: str) -> Tensor:
    found = _process().lanes[group]
    return _begin(found, x, out, partial(_sum, out, op), _entries(found, "all_reduce", x))


def _all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    found, out = _process().lanes[group], x.new_empty(ranks * x.shape[0], *x.shape[1:])

    def finish(parts: list[Tensor]) -> None:
        for into, part in zip(out.chunk(ranks), parts, strict=True):
            into.copy_(part)

    return _begin(found, x, out, finish, _entries(found, "all_gather", out))


def _reduce_scatter(x: Tensor, op: str, ranks: int, group: str) -> Tensor:
    found, out = _process().lanes[group], x.new_empty(x.shape[0] // ranks, *x.shape[1:])

    def finish(parts: list[Tensor]) -> None:
        _sum(out, op, [part.chunk(ranks)[found.rank] for part in parts])

    return _begin(found, x, out, finish, _entries(found, "reduce_scatter", x))


def _all_to_all(x: Tensor, ranks: int, group: str) -> Tensor:
    found, out = _process().lanes[group], torch.empty_like(x)

    def finish(parts: list[Tensor]) -> None:
        for into, part in zip(out.chunk(ranks), parts, strict=True):
            into.copy_(part.chunk(ranks)[found.rank])

    return _begin(found, x, out, finish, _entries(found, "all_to_all", x))


def _pass_on(x: Tensor, group: str) -> Tensor:
    """Give the next rank a tensor, and get the one of the rank before."""
    found, out = _process().lanes[group], torch.empty_like(x)
    size = len(found.ranks)
    before, after = (found.rank - 1) % size, (found.rank + 1) % size

    def finish(parts: list[Tensor]) -> None:
        out.copy_(parts[before])

    sent = _entries(found, "send", x, found.ranks[after])
    return _begin(found, x, out, finish, sent + _entries(found, "recv", x, found.ranks[before]))


def _entries(found: _Open, kind: str, message: Tensor, peer: int = -1) -> tuple[int, ...]:
    size = message.numel() * message.element_size()
    return (found.ledger.begin(kind, found.number, size, peer),)


def _begin(
    found: _Open, x: Tensor, out: Tensor, finish: Finish, entries: tuple[int, ...]
) -> Tensor:
    """Leave this rank's part of what `out` will be."""
    number = found.lane.leave(x, finish)
    _process().begun[out.data_ptr()] = (found, number, entries)
    return out


def _wait(x: Tensor) -> Tensor:
    """Return a tensor with what it was begun for; one that was begun by none is as it is."""
    begun = _process().begun.pop(x.data_ptr(), None)
    if begun is not None:
        found, number, entries = begun
        found.ledger.wait(*entries)
        found.lane.collect(number)
        found.ledger.end(*entries)
    return x


def _sum(out: Tensor, op: str, parts: list[Tensor]) -> None:
    """Reduce the parts of all ranks, on each in the same order: they get the same bits."""
    reduced = _REDUCTIONS[op]
    reduced(parts[0], parts[1], out=out)
    for part in parts[2:]:
        reduced(out, part, out=out)


@cache
def _process() -> _Process:
    """Return this process's; its operators are defined once, with the first lane."""
    _define()
    return _Process()


@cache
def _define() -> Any:
    library: Any = torch.library.Library(SPACE, "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "CPU")
    return library


_KERNELS: Final = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "pass_on": _pass_on,
    "wait_tensor": _wait,
}
