"""The messages of one rank in one optimizer step: kind, size, count and reason.

The step is one call of `training.update.gradients`: forward and backward of all microbatches, the
sums that complete the gradients, and their norm. An axis of one rank sends nothing and is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from meshwright.program.actions import Kind, Table
from meshwright.program.gradient_sums import gradient_sums
from meshwright.program.layers import attention, block, mamba, moe
from meshwright.program.layers.linears import gathers_again
from meshwright.program.lower import Program
from meshwright.program.messages import Axis, Collective, CollectiveKind, Overlaps, Phase, Purpose
from meshwright.program.shards import data_rank
from meshwright.program.sizes import ELEMENT_BYTES, Sizes, loss_rows
from meshwright.program.stages import Stage
from meshwright.program.tp_collectives import tp_collectives
from meshwright.program.zero_collectives import gathers, reductions

# All of a `Collective` but its count.
_Alike: TypeAlias = tuple[CollectiveKind, Axis, int, Phase, Purpose, str, Overlaps]
_FP32: Final = 4  # bytes
_WIDE: Final = 8  # bytes of fp64 and int64
# What becomes of a tensor that crosses a border, in words.
_SENT: Final = {
    "all_reduce": "sum the",
    "all_gather": "gather the",
    "reduce_scatter": "sum and cut the",
}


def collectives(program: Program, rank: int) -> tuple[Collective, ...]:
    """Return all messages that a rank sends and receives in one step; equal ones are one entry with
    a count.

    On CPUs, ZeRO reduces differently, see `Target.uses_fsdp2`, and the loss processes fewer tokens
    at a time.
    """
    coordinates = program.layout.mesh.coordinates(rank)
    stages = program.held(coordinates["pp"])
    sizes = Sizes.of(program)
    messages = [
        *_targets(program),
        *_of_layers(program, sizes, stages),
        *_transfers(sizes, program.tables[coordinates["pp"]]),
        *gathers(program, coordinates, stages),
        *reductions(program, coordinates, stages),
        *_completion(program, stages, coordinates["tp"], data_rank(program.layout, coordinates)),
    ]
    if program.layout.world > 1:
        messages.append(
            Collective("all_reduce", "world", _WIDE, 1, "step", "norm", "norm: sum the squares")
        )
    return _summed(messages)


def of_microbatches(program: Program) -> tuple[Collective, ...]:
    """Return the messages of microbatches (not those once per step) in a program with one stage."""
    messages = _of_layers(program, Sizes.of(program), program.stages)
    return _summed(message for message in messages if message.phase != "step")


def _of_layers(program: Program, sizes: Sizes, stages: Sequence[Stage]) -> Iterator[Collective]:
    """Yield the messages of layers, embedding and head along tp, cp and ep."""
    yield from _tp_regions(program, sizes, stages)
    yield from block.context_messages(program, sizes, stages)
    yield from moe.messages(program, sizes, stages)


def _summed(messages: Iterable[Collective]) -> tuple[Collective, ...]:
    """Return the collectives with equal ones merged into one, whose count is their sum."""
    counts: dict[_Alike, int] = {}
    # By names: `replace` takes most of the time that a search has for messages.
    for message in messages:
        key = (
            message.kind,
            message.axis,
            message.bytes,
            message.phase,
            message.purpose,
            message.reason,
            message.overlaps,
        )
        counts[key] = counts.get(key, 0) + message.count
    return tuple(
        Collective(kind, axis, size, count, phase, purpose, reason, overlaps)
        for (kind, axis, size, phase, purpose, reason, overlaps), count in counts.items()
        if count
    )


def _targets(program: Program) -> Iterator[Collective]:
    if program.layout.dp * program.layout.cp > 1:
        reason = "loss: count the targets"
        yield Collective("all_reduce", "data", _WIDE, 1, "step", "targets", reason)


def _tp_regions(program: Program, sizes: Sizes, stages: Iterable[Stage]) -> Iterator[Collective]:
    """Yield the messages at the entries and exits of tensor-parallel regions."""
    layout, count = program.layout, program.microbatches
    if layout.tp == 1:
        return
    whole_bytes = sizes.whole_bytes
    for stage in stages:
        passes = len(stage.layers) * count
        yield from _layers_cross(program, whole_bytes, Regions.of(program, stage))
        yield from attention.norm_messages(program, sizes, passes)
        recurrent = sum(program.model.layer(layer).mamba for layer in stage.layers)
        yield from mamba.norm_messages(program, sizes, recurrent * count)
        if stage.is_first:
            yield from _embedding(program, whole_bytes, count)
        if stage.is_last:
            yield from _head(program, whole_bytes, count)
            yield from _loss(program, sizes)


def _cross(
    kind: CollectiveKind | None,
    size: int,
    count: int,
    when: tuple[Phase, Purpose],
    label: str,
    overlaps: Overlaps = "",
) -> Iterator[Collective]:
    """Yield the message at an entry or exit of a tensor-parallel region; none if `kind` is None."""
    if kind is not None:
        phase, purpose = when
        reason = f"{phase if purpose == 'layer' else purpose}: {_SENT[kind]} {label}"
        yield Collective(kind, "tp", size, count, phase, purpose, reason, overlaps)


class Regions(NamedTuple):
    """How many tensor-parallel regions a stage's microbatches pass in a step: of linear layers, and
    of experts.

    `again` is how many exits a recomputed forward passes: that of attention, because it ends with
    its last matmul; that of the MLP only where dropout or a norm follows. Selective recomputation
    saves what was received. If tp ranks are among those of `ep`, only the shared expert has a
    region.
    """

    products: int
    experts: int
    again: int

    @classmethod
    def of(cls, program: Program, stage: Stage) -> Regions:
        """Return the numbers for one stage and step."""
        model, count = program.model, program.microbatches
        kinds = [model.layer(layer) for layer in stage.layers]
        mixing = count * sum(kind.mixes for kind in kinds)
        feeding = count * sum(kind.feeds for kind in kinds)
        mixed = count * sum(map(model.has_experts, kinds))
        experts = mixed if program.layout.folds == 1 or model.shared_ffn_dim else 0
        products, recomputed = mixing + feeding - mixed, 0
        if program.layout.recompute == "full":
            recomputed = mixing + (feeding - mixed + experts) * bool(
                model.dropout or model.norms_after
            )
        return cls(products, experts, recomputed)


def _beside(program: Program) -> Overlaps:
    """Return what the sum of input gradients overlaps with: the matmuls for weight gradients, which
    frozen weights do not have."""
    return "weights" if program.model.lora is None else ""


def _layers_cross(program: Program, whole_bytes: int, regions: Regions) -> Iterator[Collective]:
    """Yield the tensor-parallel messages of layers, in which attention and MLP are a region
    each."""
    (enter, entered), (leave, left) = tp_collectives(program.layout)
    into_products, into_experts, recomputed = regions
    into_both = into_products + into_experts
    stream, results = "stream of column-parallel products", "results of row-parallel products"
    yield from _cross(enter, whole_bytes, into_both, ("forward", "layer"), stream)
    yield from _cross(leave, whole_bytes, into_both, ("forward", "layer"), results)
    yield from _cross(
        left, whole_bytes, into_both, ("backward", "layer"), f"gradients of {results}"
    )
    back: tuple[Phase, Purpose] = ("backward", "layer")
    gradients = "gradients of column-parallel products' inputs"
    yield from _cross(entered, whole_bytes, into_products, back, gradients, _beside(program))
    yield from _cross(entered, whole_bytes, into_experts, back, "gradients of experts' inputs")
    # Neither does the selective policy keep gathered tensors: they are the largest.
    if gathers_again(program):
        yield from _cross(enter, whole_bytes, into_products, back, f"{stream} again", "inputs")
    elif program.layout.recompute != "none":
        yield from _cross(enter, whole_bytes, into_both, ("recompute", "layer"), stream)
    yield from _cross(leave, whole_bytes, recomputed, ("recompute", "layer"), results)


def _embedding(program: Program, whole_bytes: int, count: int) -> Iterator[Collective]:
    leave, left = tp_collectives(program.layout).exit
    yield from _cross(leave, whole_bytes, count, ("forward", "embedding"), "ranks' rows")
    if program.model.lora is None:  # else it is frozen
        yield from _cross(left, whole_bytes, count, ("backward", "embedding"), "gradients")


def _head(program: Program, whole_bytes: int, count: int) -> Iterator[Collective]:
    """Yield the head's messages, all in the backward, which computes the logits."""
    enter, entered = tp_collectives(program.layout).entry
    yield from _cross(enter, whole_bytes, count, ("backward", "logits"), "stream before the head")
    label, overlaps = "gradients of its input", _beside(program)
    yield from _cross(entered, whole_bytes, count, ("backward", "head"), label, overlaps)


def _loss(program: Program, sizes: Sizes) -> Iterator[Collective]:
    """Yield the gathers of three numbers per token, one for each chunk of tokens of the loss."""
    rows_at_once = loss_rows(sizes.tokens, sizes.element, program.target)
    for rows, times in (
        (rows_at_once, sizes.tokens // rows_at_once),
        (sizes.tokens % rows_at_once, 1),
    ):
        size = 3 * _FP32 * rows * program.layout.tp
        reason = "loss: largest logits, sums of exponentials, target logits"
        often = program.microbatches * times * bool(rows)
        yield Collective("all_gather", "tp", size, often, "backward", "loss", reason)


def _transfers(sizes: Sizes, table: Table) -> Iterator[Collective]:
    counts = Counter(action.kind for action in table)

    def message(kind: CollectiveKind, phase: Phase, action: Kind, label: str) -> Collective:
        count, reason = counts[action], f"pipeline: {label}"
        return Collective(kind, "pp", sizes.stream_bytes, count, phase, "stream", reason)

    yield message("send", "forward", "SEND_F", "output to the next stage")
    yield message("recv", "forward", "RECV_F", "input from the stage before")
    yield message("send", "backward", "SEND_B", "gradient to the stage before")
    yield message("recv", "backward", "RECV_B", "gradient from the next stage")


def _completion(
    program: Program, stages: Iterable[Stage], tp_rank: int, data_rank: int
) -> Iterator[Collective]:
    """Yield the gradient sums outside of data parallelism, each in one message."""

    element = ELEMENT_BYTES[program.train.gradient_dtype]

    def shard(name: str) -> int:
        return element * math.prod(program.shardings[name].shape(tp_rank, data_rank))

    for gradient_sum in gradient_sums(program, stages):
        if gradient_sum.axis is not None:
            size = sum(map(shard, gradient_sum.names))
            yield Collective(
                "all_reduce", gradient_sum.axis, size, 1, "step", "gradients", gradient_sum.reason
            )
