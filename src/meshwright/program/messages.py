"""`Collective`: one kind of message of a rank, with its size, how often and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv"]
Overlaps = Literal["", "inputs", "weights", "shared"]
# When in a step a message travels: with a microbatch, or once, in `step`.
Phase = Literal["forward", "backward", "recompute", "step"]
# What it is for. `logits`: the stream before the head's products, and what the loss needs of them.
Purpose = Literal[
    "targets",
    "layer",
    "embedding",
    "logits",
    "loss",
    "head",
    "attention",
    "experts",
    "stream",
    "weights",
    "gradients",
    "norm",
]
Axis = Literal[
    "tp",
    "cp",
    "pp",
    "ep",
    "shard",
    "expert_shard",
    "replicate",
    "expert_replicate",
    "data",
    "ends",
    "world",
]

# The largest messages that go through a shared-memory channel: of a gather the part of one rank.
# docs/decisions/0025.
LARGEST_SHARED: Final = 1 << 22  # bytes


@dataclass(frozen=True)
class Collective:
    """One kind of message of a rank.

    `bytes` is the size of one message on this rank: of the gathered result, of the tensor to be
    reduced (before it is scattered), of what it hands to an all-to-all (of Ulysses with its own
    share, of ZeRO without), of what is sent or received. What crosses a link depends on the
    algorithm and is left to whom it concerns. `count` is how many there are in one optimizer step.
    `reason` is for people alone.

    `overlaps` names what is computed while it travels: of column-parallel layers the products
    that make the gradients of their inputs or of their weights, or the shared expert.

    `axis` names the ranks: those of the mesh, where `shard` joins dp_shard and cp, and `replicate`
    is dp_replicate, without ZeRO joined with cp; `data` joins all three, `ends` are the first and
    the last pipeline rank, `world` is everyone. `ep` are ranks that share out the experts,
    `expert_shard` and `expert_replicate` those of the other two that have the same experts.

    How many tokens travel along `ep` depends on the router: `bytes` is the mean, which is what
    travels where all experts get equally many.
    """

    kind: CollectiveKind
    axis: Axis
    bytes: int
    count: int
    phase: Phase
    purpose: Purpose
    reason: str
    overlaps: Overlaps = ""


def goes_by_channel(axis: str) -> bool:
    """Return whether CPU ranks of one machine send an axis' messages through a channel.

    Those of `tp`, up to `LARGEST_SHARED` bytes; all others go by gloo.
    """
    return axis == "tp"
