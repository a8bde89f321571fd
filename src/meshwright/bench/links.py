"""Measures the time of each kind of collective between local ranks, at several sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.bench.timing import seconds_between, seconds_together
from meshwright.comm.groups import Link, open_groups
from meshwright.comm.world import World
from meshwright.layout import Layout
from meshwright.parallel.tensor_parallel.tp_regions import all_reduce, begin_gather, begin_scatter
from meshwright.program.messages import LARGEST_SHARED

# Bytes of messages: an activation of a small model, a layer of one, a layer of a larger one. GPUs
# train larger ones, over links that smaller messages don't fill.
_SIZES: Final = {"cpu": (2**14, 2**20, 2**24), "cuda": (2**14, 2**20, 2**24, 2**26, 2**28)}
_SHARED_SIZES: Final = (2**14, 2**20, LARGEST_SHARED)
_WEIGHTS: Final = 9  # of a block, whose rows are gathered one weight after the other
_TIMES: Final = 12
_TURNS: Final = 3
_SIDE: Final = 640  # of the matrix that is multiplied between two messages
# Of the matrix that is multiplied beside a message, and the elements of that: a GPU's take
# milliseconds, too.
_BESIDE: Final = {"cpu": (768, 2**21), "cuda": (4096, 2**26)}


def collectives(
    world: World, kinds: Collection[str] = (), most_bytes: float = math.inf, times: int = _TIMES
) -> dict[str, list[tuple[int, float]]]:
    """Return (bytes, seconds) of each kind of collective at several sizes.

    `kinds` selects some; empty means all that the device has. Each is sent `times` times, with at
    most `most_bytes`. All ranks must call this.

    Sizes are as the program counts them: the whole of what is gathered, reduced or exchanged. Ranks
    compute between two messages, as in training, so that they do not arrive at the same moment or
    with the message in their caches. The seconds include waiting for other ranks.
    """
    sizes = [size for size in _SIZES[world.device.type] if size <= most_bytes]
    return {
        kind: _seconds(world, sizes, partial(make, world), times)
        for kind, make in _KINDS.items()
        if (not kinds or kind in kinds) and (kind not in _OF_CPUS or world.device.type == "cpu")
    }


def shared(world: World, times: int = _TIMES) -> dict[str, list[tuple[int, float]]]:
    """Return (bytes, seconds) of messages through shared memory; empty if it is not available."""
    link = open_groups(Layout(tp=world.size), world).tp
    if not link.is_shared:
        return {}
    return {
        kind: _seconds(world, _SHARED_SIZES, partial(make, link), times)
        for kind, make in _SHARED_KINDS.items()
    }


def sums_both_ways(world: World, message_bytes: int) -> tuple[float, float] | None:
    """Return the seconds of an all-reduce by gloo and through shared memory.

    None if a message of this size does not use shared memory. Both alternate, with matmuls in
    between.
    """
    link = open_groups(Layout(tp=world.size), world).tp
    if not link.is_shared or message_bytes > LARGEST_SHARED:
        return None
    makes = (partial(_all_reduce, world), partial(_shared_sum, link))
    turns = [
        [_seconds(world, [message_bytes], make)[0][1] for make in makes] for _ in range(_TURNS)
    ]
    by_gloo, by_channel = (
        statistics.median(turn_seconds) for turn_seconds in zip(*turns, strict=True)
    )
    return by_gloo, by_channel


def _seconds(
    world: World,
    sizes: Sequence[int],
    make: Callable[[int], Callable[[], object]],
    times: int = _TIMES,
) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of messages; `make` returns one, given its fp32 elements."""
    factor = torch.randn(_SIDE, _SIDE, device=world.device)
    return [
        (size, seconds_between(lambda: factor @ factor, make(size // 4), times, world.device))
        for size in sizes
    ]


def overlap(world: World) -> float:
    """Return how much of a matmul and an all-reduce overlaps, as a share of the shorter one."""
    side, elements = _BESIDE[world.device.type]
    factor = torch.randn(side, side, device=world.device)
    message = torch.ones(elements, device=world.device)

    def compute() -> None:
        for _ in range(8):
            factor @ factor

    def together() -> None:
        work = dist.all_reduce(message, async_op=True)
        compute()
        assert work is not None
        work.wait()

    alone = seconds_together(compute, _TIMES, world.device)
    sent = seconds_together(lambda: dist.all_reduce(message), _TIMES, world.device)
    overlapped = seconds_together(together, _TIMES, world.device)
    return min(1.0, max(0.0, (alone + sent - overlapped) / min(alone, sent)))


def _all_reduce(world: World, count: int) -> Callable[[], object]:
    tensor = torch.ones(count, device=world.device)
    return lambda: dist.all_reduce(tensor)


def _all_gather(world: World, count: int) -> Callable[[], object]:
    shard, gathered = _part_and_whole(world, count)
    return lambda: dist.all_gather_into_tensor(gathered, shard)


def _reduce_scatter(world: World, count: int) -> Callable[[], object]:
    shard, message = _part_and_whole(world, count)
    return lambda: dist.reduce_scatter_tensor(shard, message)


def _all_to_all(world: World, count: int) -> Callable[[], object]:
    sent, received = torch.ones(count, device=world.device), torch.empty(count, device=world.device)
    return lambda: dist.all_to_all_single(received, sent)


def _send(world: World, count: int) -> Callable[[], object]:
    """Return a function that sends a message from rank 0 to rank 1 and back, half each way."""
    tensor = torch.ones(count // 2, device=world.device)

    def there_and_back() -> None:
        if world.rank < 2:
            order = (dist.send, dist.recv) if world.rank == 0 else (dist.recv, dist.send)
            for act in order:
                act(tensor, 1 - world.rank)

    return there_and_back


def _rows(world: World, count: int) -> Callable[[], object]:
    """Return a function by which all ranks exchange their rows of a layer's weights.

    Each rank sends its rows of each weight to every other rank.
    """
    weights = [
        torch.ones(world.size, max(1, count // world.size // _WEIGHTS), device=world.device)
        for _ in range(_WEIGHTS)
    ]

    def gather() -> None:
        works = []
        for weight in weights:
            for step in range(1, world.size):
                after, before = (world.rank + step) % world.size, (world.rank - step) % world.size
                works.append(dist.isend(weight[world.rank], after))
                works.append(dist.irecv(weight[before], before))
        for work in works:
            assert work is not None
            work.wait()

    return gather


def _shared_sum(link: Link, count: int) -> Callable[[], object]:
    tensor = torch.ones(count)
    return lambda: all_reduce(tensor, link)


def _shared_gather(link: Link, count: int) -> Callable[[], object]:
    shard = torch.ones(1, count // link.size)
    return lambda: begin_gather(shard, link)()


def _shared_scatter(link: Link, count: int) -> Callable[[], object]:
    message = torch.ones(1, count // link.size * link.size)
    return lambda: begin_scatter(message, link)()


def _part_and_whole(world: World, count: int) -> tuple[Tensor, Tensor]:
    shard = torch.ones(count // world.size, device=world.device)
    return shard, torch.ones(count // world.size * world.size, device=world.device)


_KINDS: Final[Mapping[str, Callable[[World, int], Callable[[], object]]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
    "rows": _rows,
}
# GPUs have no exchange of rows: FSDP2 shards for them. And NCCL blocks a host in the first send to
# a rank until that rank receives, which around a circle is never.
_OF_CPUS: Final = ("rows",)
_SHARED_KINDS: Final[Mapping[str, Callable[[Link, int], Callable[[], object]]]] = {
    "all_reduce": _shared_sum,
    "all_gather": _shared_gather,
    "reduce_scatter": _shared_scatter,
}
