"""`Collective`: a message of a rank in a step, with its size, count and reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv"]
Overlaps = Literal["", "inputs", "weights", "shared"]
# When in a step a message travels: with a microbatch, or once, in `step`.
Phase = Literal["forward", "backward", "recompute", "step"]
# What it is for. `logits`: the stream before the head's products, and what the loss needs of them.
# `scales`: what decides the scales of weights that are gathered in float8.
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
    "scales",
    "gradients",
    "norm",
    "update",
]
# Of those, what a model's ends send: the embedding, and what is after the layers.
OF_ENDS: Final[tuple[Purpose, ...]] = ("embedding", "logits", "loss", "head")
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
    """A message that a rank sends or takes part in, `count` times in one optimizer step.

    `bytes` is the size of one message on this rank: the result of a gather, the input of a
    reduction (before it is scattered), the input of an all-to-all (for Ulysses with the rank's own
    share, for ZeRO without), the tensor of a send or receive. The bytes on a link depend on the
    algorithm and are not included. `reason` is only for people.

    `overlaps` names what is computed while it travels: the matmuls of column-parallel layers for
    gradients of their inputs or of their weights, or the shared expert.

    `axis` names the ranks: an axis of the mesh, where `shard` joins dp_shard and cp, and
    `replicate` is dp_replicate, joined with cp without ZeRO; `data` joins all three, `ends` are the
    first and the last pipeline rank, `world` is everyone. `ep` are the ranks that divide the
    experts, `expert_shard` and `expert_replicate` the ranks of `shard` and `replicate` with the
    same experts.

    The number of tokens sent along `ep` depends on the router: `bytes` is the mean, which is exact
    if all experts receive equally many.
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
    """Return whether CPU ranks of one machine send an axis' messages through shared memory.

    Those of `tp` do, up to `LARGEST_SHARED` bytes; all others go through gloo.
    """
    return axis == "tp"
