"""Collectives through a shared-memory `Channel`, as operators like torch's functional ones.

`torch.ops.meshwright_channel` has some of `torch.ops._c10d_functional`, with their arguments and
meaning: an operator returns a tensor that is filled once `wait_tensor` returns. Because they are
operators, message recorders and selective recomputation see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.channel import LARGEST, Channel, Finish, open_channel
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.world import exchange

SPACE: Final = "meshwright_channel"
_SCHEMAS: Final = (
    "all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor",
    "all_reduce_(Tensor input, str reduce_op, str group_name) -> Tensor",
    "all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor",
    "reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name) -> Tensor",
    "wait_tensor(Tensor input) -> Tensor",
)
_REDUCTIONS: Final[Mapping[str, Callable[..., Tensor]]] = {"sum": torch.add, "max": torch.maximum}


@dataclass
class Open:
    """A group's channel, this rank's index in the group, and the group's number in the flight
    recorder."""

    group: dist.ProcessGroup
    channel: Channel
    rank: int
    number: int = 0


@dataclass
class _Process:
    """A process's channels by group name, and its pending collectives by the address of their
    results.

    A channel lasts as long as a link refers to it.
    """

    channels: WeakValueDictionary[str, Open] = field(default_factory=WeakValueDictionary)
    begun: dict[int, tuple[Open, int, int]] = field(default_factory=dict)


def share(group: dist.ProcessGroup, recorder: FlightRecorder, timeout_s: float) -> Open | None:
    """Return the channel of a gloo group, opening one if it has none; a collective.

    None on all its ranks if a channel isn't possible. A channel lasts as long as the returned
    object: those of unused layouts would add up.
    """
    known, name = _process().channels, group.group_name
    opened = known.get(name)
    if opened is not None and opened.group is not group:  # names come again with new worlds
        opened = None
    # Each rank forgets what nobody keeps at a moment of its own.
    if not all(exchange("" if opened is None else "known", group)):
        channel = open_channel(group, timeout_s, recorder)
        if channel is None:
            return None
        opened = known[name] = Open(group, channel, dist.get_rank(group))
    assert opened is not None
    opened.channel.recorder = recorder  # another world may have opened it
    opened.number = recorder.group(name, dist.get_process_group_ranks(group))
    return opened


def channel_of(group: dist.ProcessGroup) -> Channel:
    """Return the open channel of a group; raises `KeyError` if it has none."""
    return _process().channels[group.group_name].channel


def channels() -> list[Channel]:
    """Return the open channels of this process."""
    return [opened.channel for opened in _process().channels.values()]


def release_channels() -> None:
    """Release all channels of this process, and forget the collectives that are not finished."""
    for channel in channels():
        channel.release()
    _process().begun.clear()


def operators(message: Tensor, *, is_shared: bool) -> Any:
    """Return the operators for a message: a channel's, or torch's functional ones if it is too
    large or not shared.

    The message size must be the same on every rank. Code that is being compiled uses torch's.
    """
    size = message.numel() * message.element_size()
    if is_shared and 0 < size <= LARGEST and not torch.compiler.is_compiling():
        return getattr(torch.ops, SPACE)
    return torch.ops._c10d_functional


def _all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    return _reduce(x, torch.empty_like(x), op, group)


def _all_reduce_(x: Tensor, op: str, group: str) -> Tensor:
    return _reduce(x, x, op, group)


def _reduce(x: Tensor, out: Tensor, op: str, group: str) -> Tensor:
    opened = _process().channels[group]
    return _begin(opened, "all_reduce", x, out, x, partial(_sum, out, _REDUCTIONS[op]))


def _all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    opened, out = _process().channels[group], x.new_empty(ranks * x.shape[0], *x.shape[1:])

    def finish(parts: list[Tensor]) -> None:
        for into, part in zip(out.chunk(ranks), parts, strict=True):
            into.copy_(part)

    return _begin(opened, "all_gather", x, out, out, finish)


def _reduce_scatter(x: Tensor, op: str, ranks: int, group: str) -> Tensor:
    opened, out = _process().channels[group], x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    reduced = _REDUCTIONS[op]

    def finish(parts: list[Tensor]) -> None:
        _sum(out, reduced, [part.chunk(ranks)[opened.rank] for part in parts])

    return _begin(opened, "reduce_scatter", x, out, x, finish)


def _begin(
    opened: Open, kind: str, x: Tensor, out: Tensor, message: Tensor, finish: Finish
) -> Tensor:
    """Begin a collective: write this rank's part `x`, and return `out`, which `finish` fills later.

    The recorder counts the bytes of `message`.
    """
    message_bytes = message.numel() * message.element_size()
    entry = opened.channel.recorder.begin(kind, opened.number, message_bytes)
    _process().begun[out.data_ptr()] = (opened, opened.channel.leave(x, finish, (entry,)), entry)
    return out


def _wait(x: Tensor) -> Tensor:
    """Wait for the collective that fills x, if there is one, and return x."""
    begun = _process().begun.pop(x.data_ptr(), None)
    if begun is not None:
        opened, number, entry = begun
        channel = opened.channel
        channel.recorder.wait(entry)
        channel.collect(number)
        channel.recorder.end(entry)
    return x


def _sum(out: Tensor, reduced: Callable[..., Tensor], parts: list[Tensor]) -> None:
    """Reduce the parts of all ranks into `out`, on each rank in the same order, so that all get the
    same bits."""
    reduced(parts[0], parts[1], out=out)
    for part in parts[2:]:
        reduced(out, part, out=out)


@cache
def _process() -> _Process:
    """Return this process's channels; the first call registers the operators."""
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
    "wait_tensor": _wait,
}
