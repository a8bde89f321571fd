"""`Collective`: one kind of message of a rank, with its size, how often and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv"]
Beside = Literal["", "inputs", "weights"]
Axis = Literal["tp", "cp", "pp", "shard", "replicate", "data", "ends", "world"]

# Axes whose messages go through a lane where CPU ranks share a machine, and the largest that do:
# of a gather the part of one rank. docs/decisions/0025.
_BY_LANE: Final = frozenset({"tp"})
LARGEST_SHARED: Final = 1 << 22  # bytes


@dataclass(frozen=True)
class Collective:
    """One kind of message of a rank.

    `bytes` is the size of one message on this rank: of the gathered result, of the tensor to be
    reduced (before it is scattered), of what it hands to an all-to-all (of Ulysses with its own
    share, of ZeRO without), of what is sent or received. What crosses a link depends on the
    algorithm and is left to whom it concerns. `count` is how many there are in one optimizer step.

    `beside` names the products of column-parallel layers that are computed while it travels: those
    that make the gradients of their inputs or of their weights.

    `axis` names the ranks: those of the mesh, where `shard` joins dp_shard and cp, and `replicate`
    is dp_replicate, without ZeRO joined with cp; `data` joins all three, `ends` are the first and
    the last pipeline rank, `world` is everyone.
    """

    kind: CollectiveKind
    axis: Axis
    bytes: int
    count: int
    reason: str
    beside: Beside = ""


def goes_by_lane(axis: str) -> bool:
    """Return whether CPU ranks of one machine send an axis' messages through a lane.

    Those of `LARGEST_SHARED` bytes at most, that is; the others go as elsewhere.
    """
    return axis in _BY_LANE
