"""The work of one microbatch in a layer, in the embedding, and in the head, read from programs.

Layers of a kind cost the same wherever they are: the program of a one-layer model gives the cost of
each kind and of the ends. A layout's price is then a sum of a few numbers, which thousands of
layouts share; tests compare it with the whole program's tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, starmap
from operator import mul
from typing import Final, NamedTuple

from meshwright.cost.attending import Attends, attends
from meshwright.cost.timeline import layer_bytes
from meshwright.layout import Layout
from meshwright.program.collectives import of_microbatches
from meshwright.program.lower import Program
from meshwright.program.messages import OF_ENDS, Overlaps, Phase, Purpose
from meshwright.program.nf4_workspace import dequantising_bytes
from meshwright.program.operations import Operation, operations
from meshwright.program.saved import PRODUCT_BACKWARD
from meshwright.program.sizes import Sizes
from meshwright.program.stages import Stage
from meshwright.program.target import Target
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import OptimizerSpec, TrainSpec

_CPU: Final = Target()


class Product(NamedTuple):
    """A matmul `[rows, inner] x [inner, outer]`; with `groups`, the rows are divided over as many
    matrices.

    `is_column`: its outputs are split over tp (column-parallel), and its messages overlap with it.
    `backward` is the backward's work in multiples of the forward's. `of_shared`: it belongs to the
    shared expert.
    """

    rows: int
    inner: int
    outer: int
    is_column: bool = False
    groups: int = 1
    backward: float = PRODUCT_BACKWARD
    of_shared: bool = False

    @property
    def sides(self) -> tuple[int, int, int]:
        """The sizes rows, inner and outer."""
        return self.rows, self.inner, self.outer

    @property
    def flops(self) -> float:
        """FLOPs of the forward."""
        return 2.0 * self.rows * self.inner * self.outer


class Message(NamedTuple):
    """A collective of one microbatch, sent `times` times.

    `phase`, `purpose` and `overlaps` are as in `program.messages.Collective`.
    """

    kind: str
    axis: str
    bytes: int
    times: int
    phase: Phase
    purpose: Purpose
    overlaps: Overlaps = ""


class Work(NamedTuple):
    """The work of one microbatch on one rank in a layer, or in an end of the model; forward FLOPs
    and bytes.

    `attention_backward` are the FLOPs of attention's backward. `moved` are the bytes that a forward
    reads and writes outside of matmuls and attention, each tensor once per operation; `norm_moved`
    those of norms, `loss_moved` of the loss. `kept` is saved for the backward, by kind of
    operation. `scores` are the query-key pairs over all local heads. `deferred` is what deferred
    weight gradients hold: inputs and gradients of outputs of all matmuls. `at_work` is by how much
    a backward exceeds `kept` at most: recomputed tensors, and gradients in flight. `leaves` is the
    part of `kept` that goes to the host if activations are offloaded. `attends` decides on
    attention's kernel.
    """

    products: tuple[Product, ...]
    attention_flops: float
    attention_backward: float
    scores: int
    moved: float
    norm_moved: float
    loss_moved: float
    kept: tuple[tuple[str, float], ...]
    deferred: float
    at_work: float
    messages: tuple[Message, ...]
    leaves: tuple[tuple[str, float], ...] = ()
    attends: Attends = ""


class RankLayers(NamedTuple):
    """What a pipeline rank holds: the number of layers of each kind, and whether embedding and
    head.

    Kinds are in the order of `ModelSpec.layer_kinds`. `embeddings` counts copies of the embedding:
    the stage of a tied head has its own one, even on the same rank.
    """

    kinds: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    embeddings: int

    @classmethod
    def of(cls, model: ModelSpec, stages: Sequence[Stage]) -> RankLayers:
        """Return the contents of some stages together."""
        counts = Counter(model.layer(layer) for stage in stages for layer in stage.layers)
        kinds = tuple(counts[kind] for kind in model.layer_kinds)
        tied = model.tie_embeddings
        return cls(
            kinds,
            any(stage.is_first for stage in stages),
            any(stage.is_last for stage in stages),
            sum(stage.is_first or (stage.is_last and tied) for stage in stages),
        )

    @property
    def layers(self) -> int:
        """The number of layers of all kinds."""
        return sum(self.kinds)

    def total(self, per_kind: Iterable[float]) -> float:
        """Return the sum over the rank's layers of a number given for each kind of layer.

        Raises `ValueError` unless there is one number for each kind.
        """
        if len(self.kinds) == 1:  # of most models, and a search asks for it most often
            (only,) = per_kind
            return float(self.kinds[0] * only)
        return float(sum(starmap(mul, zip(self.kinds, per_kind, strict=True))))


class _SequenceWork(NamedTuple):
    """The work of a microbatch of one sequence: a layer of each kind, before the layers, and after
    them."""

    sizes: Sizes
    layers: tuple[Work, ...]
    first: Work
    last: Work


@dataclass(frozen=True, eq=False)
class LayoutWork:
    """The work of a layout's microbatch of `rows` sequences.

    Each part is that of one sequence times `rows`, computed on demand: a search has thousands of
    microbatches, and seldom needs all parts of one.
    """

    one: _SequenceWork
    rows: int

    @cached_property
    def sizes(self) -> Sizes:
        """The tensor sizes of a rank's part of the microbatch."""
        sizes, rows = self.one.sizes, self.rows
        return sizes._replace(rows=rows, tokens=sizes.tokens * rows, stream=sizes.stream * rows)

    @cached_property
    def layers(self) -> tuple[Work, ...]:
        """The work of a layer of each kind."""
        return tuple(map(self.layer, range(len(self.one.layers))))

    def layer(self, kind: int) -> Work:
        """Return the work of a layer of one kind, given by its index in `ModelSpec.layer_kinds`."""
        return _times(self.one.layers[kind], self.rows)

    @property
    def first(self) -> Work:
        """The work before the layers: the embedding."""
        return _times(self.one.first, self.rows)

    @property
    def last(self) -> Work:
        """The work after the layers: last norm, head and loss."""
        return _times(self.one.last, self.rows)


@lru_cache(maxsize=8192)
def layout_work(
    model: ModelSpec,
    seq_len: int,
    precision: str,
    tp: int,
    sp: bool,
    cp: int,
    cp_kind: str,
    microbatch: int,
    recompute: str,
    ep: int = 1,
    etp: int | None = None,
    imbalance: float = 1.0,
    *,
    fp8: bool = False,
    target: Target = _CPU,
) -> LayoutWork:
    """Return the work of a microbatch of `microbatch` sequences with these layout keys; cached.

    `target` has the device and whether it compiles; `imbalance` replaces that of the target.
    """
    of_one = (seq_len, precision, tp, sp, cp, cp_kind)
    shared_out = (ep, etp, imbalance)
    if microbatch > 1:
        single = layout_work(model, *of_one, 1, recompute, *shared_out, fp8=fp8, target=target)
        return LayoutWork(single.one, microbatch)
    if len(model.layer_kinds) > 1:
        # Layers without experts are the same however others are shared out: the cache has them.
        by_kind = {
            kind: layout_work(
                model.alike(kind),
                *of_one,
                1,
                recompute,
                *(shared_out if model.has_experts(kind) else ()),
                fp8=fp8,
                target=target,
            )
            for kind in model.layer_kinds
        }
        with_experts = by_kind[max(by_kind, key=model.has_experts)].one
        layers = tuple(work.one.layers[0] for work in by_kind.values())
        return LayoutWork(with_experts._replace(layers=layers), 1)
    degrees = {"tp": tp, "sp": sp, "cp": cp, "cp_kind": cp_kind, "ep": ep, "etp": etp}
    layout = Layout.model_validate({**degrees, "microbatch": 1, "recompute": recompute})
    batch = layout.expert_data
    layout = layout.model_copy(update={"dp_replicate": batch})
    fields = {"batch": batch, "seq_len": seq_len, "precision": precision, "fp8": fp8}
    train = TrainSpec.model_validate(fields)
    small = model.model_copy(update={"n_layers": 1})
    one_layer = Program(
        small,
        train,
        OptimizerSpec(),
        layout,
        (Stage(0, 0, 1, True, True),),
        target._replace(imbalance=imbalance),
    )
    return LayoutWork(_sequence_work(one_layer), 1)


def _sequence_work(one_layer: Program) -> _SequenceWork:
    """Return the work of a microbatch, from the program of a one-layer model and one sequence."""
    sizes = Sizes.of(one_layer)
    ops = operations(one_layer, one_layer.stages[0])
    layer_ops = tuple(op for op in ops if op.name.startswith("layers."))
    first_ops = tuple(op for op in ops if op.kind == "embedding")
    last_ops = ops[len(first_ops) + len(layer_ops) :]
    messages = _messages(one_layer)
    layer_messages = tuple(m for m in messages if m.purpose not in OF_ENDS)
    first = tuple(m for m in messages if m.purpose == "embedding")
    last = tuple(m for m in messages if m.purpose in OF_ENDS and m.purpose != "embedding")
    return _SequenceWork(
        sizes,
        (_work(one_layer, sizes, layer_ops, layer_messages),),
        _work(one_layer, sizes, first_ops, first),
        _work(one_layer, sizes, last_ops, last),
    )


def _times(work: Work, rows: int) -> Work:
    """Return the work of `rows` times as many sequences."""
    if rows == 1:
        return work
    return Work(
        tuple([Product(product.rows * rows, *product[1:]) for product in work.products]),
        work.attention_flops * rows,
        work.attention_backward * rows,
        work.scores * rows,
        work.moved * rows,
        work.norm_moved * rows,
        work.loss_moved * rows,
        # Sequences share the cosines and sines of their positions.
        tuple([(kind, size * (1 if kind == "rotation" else rows)) for kind, size in work.kept]),
        work.deferred * rows,
        work.at_work * rows,
        # `_replace` takes three times as long.
        tuple(
            [
                Message(kind, axis, size * rows, times, phase, purpose, overlaps)
                for kind, axis, size, times, phase, purpose, overlaps in work.messages
            ]
        ),
        tuple([(kind, size * rows) for kind, size in work.leaves]),
        work.attends,
    )


def _messages(program: Program) -> tuple[Message, ...]:
    """Return the messages of one microbatch over tp, cp and ep; data parallelism is priced
    separately.

    The messages of the loss are merged into one, because their number depends on the device.
    """
    messages = [
        Message(
            message.kind,
            message.axis,
            message.bytes,
            message.count,
            message.phase,
            message.purpose,
            message.overlaps,
        )
        for message in of_microbatches(program)
        if message.axis in ("tp", "cp", "ep")
    ]
    loss = [message for message in messages if message.purpose == "loss"]
    size = sum(message.bytes * message.times for message in loss)
    joined = [message._replace(bytes=size, times=1) for message in loss[:1]]
    return (*(message for message in messages if message.purpose != "loss"), *joined)


def _work(
    program: Program,
    sizes: Sizes,
    ops: tuple[Operation, ...],
    messages: tuple[Message, ...],
) -> Work:
    products = tuple(_product(program, sizes, op) for op in ops if op.kind == "product")
    attention, backward, scores = 0.0, 0.0, 0
    if any(op.kind == "attention" for op in ops):
        attention, backward = _attention_flops(program, ops)
        scores = sizes.rows * sizes.heads * program.sequence * program.train.seq_len
    moved = float(sum(op.io_bytes for op in ops))
    kind, is_layer = program.model.layer(0), any(op.layer is not None for op in ops)
    if is_layer:
        # A residual sum of each sublayer: two read, one written.
        moved += (kind.mixes + kind.feeds) * 3 * sizes.stream_bytes
        moved += dequantising_bytes(program, sizes)
    norms = sum(2.0 * op.normed_bytes for op in ops)
    # Logits read, the fp32 softmax written and read.
    has_loss = any(op.kind == "loss" for op in ops)
    loss = float(sizes.tokens * sizes.vocab * (sizes.element + 8)) if has_loss else 0.0
    saved: dict[str, float] = {}
    leaves: dict[str, float] = {}
    for op in ops:
        saved[op.kind] = saved.get(op.kind, 0.0) + op.saved_bytes
        leaves[op.kind] = leaves.get(op.kind, 0.0) + op.moved_bytes
    kernel = attends(program.model, kind, program.train.seq_len)
    at_backward = _backward_bytes(program, sizes, ops) if is_layer else (0.0, 0.0)
    sizes_kept = tuple(saved.items()), *at_backward, messages, tuple(leaves.items())
    return Work(products, attention, backward, scores, moved, norms, loss, *sizes_kept, kernel)


def _backward_bytes(
    program: Program, sizes: Sizes, ops: tuple[Operation, ...]
) -> tuple[float, float]:
    """Return `deferred` and `at_work` of a layer with these operations, from the rows by which
    `timeline` walks through its backward."""
    rows = layer_bytes(program, sizes, program.stages[0], program.model.layer(0), 0, ops)
    deferred = 0
    above = sum(size for _, size in rows.anew) - sum(size for _, size in rows.kept)
    peak_above = above
    for need, freed in rows.backward:
        released = sum(size for _, size in freed)
        if need.deferred:
            deferred += need.deferred + released
        peak_above = max(peak_above, above + need.bytes + need.room)
        above -= released
    return float(deferred), float(peak_above + sizes.stream_bytes)


def _attention_flops(program: Program, ops: tuple[Operation, ...]) -> tuple[float, float]:
    """Return the attention FLOPs of a layer, forward and backward, on the cp rank that has most;
    `ops` are those of cp rank 0.

    Without a window, all ranks have equally many.
    """
    other_ranks = range(1, program.layout.cp) if program.model.layer(0).window is not None else ()
    per_rank = (operations(program, program.stages[0], cp_rank=rank) for rank in other_ranks)
    sums = []
    for rank_ops in chain([ops], per_rank):
        kernels = [op for op in rank_ops if op.kind == "attention"]
        flops = sum(op.flops for op in kernels)
        sums.append((flops, sum(op.flops * op.backward for op in kernels)))
    return max(sums)


def _product(program: Program, sizes: Sizes, op: Operation) -> Product:
    """Return the shape of a matmul, from the parameter that it multiplies with."""
    name = op.name
    weight = name.replace("layers.*", "layers.0")
    if weight not in program.shardings:  # but for an adapter's matrix it is a layer's name
        weight += ".weight"
    if weight == "head.weight" and program.model.tie_embeddings:
        weight = "embed.weight"
    sharding = program.shardings[weight]
    *experts, outer, inner = sharding.tp_shape
    if experts:
        return Product(sizes.received, inner, outer, False, experts[0], op.backward)
    # A latent vector's first product sends, and is whole on each rank.
    rows = sizes.routed if name.endswith("mlp.router") else sizes.tokens
    shared = ".shared." in name
    is_column = sharding.tp_dim == 0 or name.endswith((".q_a", ".kv_a"))
    is_column = is_column and not (shared or name.endswith((".q_b", ".kv_b")))
    return Product(rows, inner, outer, is_column, 1, op.backward, shared)
