"""`timeline`: a rank's memory through a step, operation by operation, in bytes by category.

Simulates what Meshwright's engine allocates and releases for each action of the rank's table. The
saved bytes of operations and their workspaces come from the program, and what data parallelism
gathers and reduces from `cost.units`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from meshwright.cost.byte_count import ByteCount, PredictedMoment
from meshwright.cost.moves import Moves
from meshwright.cost.units import GRADIENTS, Units
from meshwright.program.layers.block import backward_workspaces, forward_workspace
from meshwright.program.layers.linears import of_input
from meshwright.program.layers.workspace import Workspace
from meshwright.program.lower import Program
from meshwright.program.operations import Operation, operations
from meshwright.program.schedule import Action, Kind, Table
from meshwright.program.sizes import Sizes, fuses_loss, loss_element, loss_rows, loss_workspace
from meshwright.program.stages import Stage
from meshwright.program.update import update_workspace
from meshwright.spec.model import LayerSpec

_WIDE: Final = 4
STREAM: Final = "pipeline"
LOSS: Final = "logits and loss"
TABLES: Final = "rotary tables"
DEFERRED: Final = "deferred gradients"
UPDATE: Final = "temporary"

Size = tuple[str, int]
"""A category of what is held, and bytes of it."""


class LayerBytes(NamedTuple):
    """The bytes that a kind of layer saves of a microbatch, and releases during its backward.

    `kept` is saved by the forward; `anew` exists at the start of the backward, after recomputation.
    `backward` has the steps of the backward: a workspace, and the saved bytes that are then
    released; `left` is released after all. `room` is the workspace of the forward.
    """

    kept: tuple[Size, ...]
    anew: tuple[Size, ...]
    backward: tuple[tuple[Workspace, tuple[Size, ...]], ...]
    left: tuple[Size, ...]
    room: int


def layer_bytes(
    program: Program,
    sizes: Sizes,
    stage: Stage,
    kind: LayerSpec,
    cp_rank: int,
    ops: Iterable[Operation] | None = None,
) -> LayerBytes:
    """Return the bytes that a kind of layer in a stage saves and releases.

    `ops` are the stage's `operations` on this cp rank, if the caller has them.
    """
    if ops is None:
        ops = operations(program, stage, cp_rank=cp_rank)
    first = [op for op in ops if op.layer == kind]
    anew = first
    if program.layout.recompute != "none":
        recomputed_ops = operations(program, stage, cp_rank=cp_rank, recomputed=True)
        anew = [op for op in recomputed_ops if op.layer == kind]
    backward, alive = [], anew
    for need in backward_workspaces(program, sizes, kind):
        name = f"layers.*.{need.op}"
        backward.append((need, kept(op for op in alive if op.name == name)))
        alive = [op for op in alive if op.name != name]
    room = forward_workspace(program, sizes, kind)
    return LayerBytes(kept(first), kept(anew), tuple(backward), kept(alive), room)


def kept(ops: Iterable[Operation]) -> tuple[Size, ...]:
    """Return the bytes that operations save for the backward, by category."""
    sums: dict[str, int] = {}
    for op in ops:
        category = f"activations: {op.kind}"
        sums[category] = sums.get(category, 0) + op.saved_bytes
    return tuple((category, size) for category, size in sums.items() if size)


@dataclass(frozen=True)
class Timeline:
    """The snapshots of one rank's memory during a step, in order."""

    moments: tuple[PredictedMoment, ...]

    @property
    def peak(self) -> PredictedMoment:
        """The first snapshot with the most bytes."""
        return max(self.moments, key=lambda moment: moment.total)


def of_layer(layer: int) -> str:
    """Return the name that snapshots in a layer have."""
    return f"layer {layer}"


def timeline(program: Program, rank: int) -> Timeline:
    """Return the memory of rank `rank` of the world through a step, other than the run's first, in
    bytes."""
    walk = Walk(program, rank, ByteCount())
    walk.run()
    return Timeline(tuple(walk.bytes_held.moments))


class Walk:
    """Simulates the memory of a rank of the world through a step; `bytes_held` counts its bytes.

    `table` replaces the program's action table.
    """

    def __init__(
        self, program: Program, rank: int, bytes_held: ByteCount, table: Table | None = None
    ) -> None:
        self.program = program
        self.at = program.layout.mesh.coordinates(rank)
        self.table = program.tables[self.at["pp"]] if table is None else table
        self.sizes = Sizes.of(program)
        self.bytes_held = bytes_held
        self.stages = {stage.index: stage for stage in program.held(self.at["pp"])}
        self.layers = self._layers()
        self.units = {
            index: Units(program, stage, self.at, self.bytes_held)
            for index, stage in self.stages.items()
        }
        self.last = len(program.stages) - 1
        self.ends = {action.stage: action for action in self.table if action.kind in ("B", "W")}
        self.sent: dict[int, int] = {}  # bytes on their way, by peer
        self.proves: dict[Action, int] = {}  # those that a receive proves to have arrived
        self.deferred: dict[int, int] = {}  # of a microbatch, by stage
        self.known: dict[int, tuple[Operation, ...]] = {}
        self.moves = Moves(program, self.stages, self.at["cp"], bytes_held)

    def _layers(self) -> dict[LayerSpec, LayerBytes]:
        """Return the bytes that each kind of layer on the rank saves and releases."""
        by_kind: dict[LayerSpec, LayerBytes] = {}
        for stage in self.stages.values():
            kinds = {self.program.model.layer(layer) for layer in stage.layers}
            for kind in kinds - by_kind.keys():
                by_kind[kind] = layer_bytes(self.program, self.sizes, stage, kind, self.at["cp"])
        return by_kind

    def run(self) -> None:
        """Simulate the step, and record its snapshots."""
        bytes_held, program = self.bytes_held, self.program
        for units in self.units.values():
            units.hold()
        # Cosines and sines of every position, for each stage: fp32.
        model = program.model
        table = 2 * program.train.seq_len * model.rotary_dim * _WIDE * len(model.rotary_bases)
        bytes_held.add(TABLES, table * len(self.stages))
        bytes_held.action = "start"
        bytes_held.note("start")
        for action in self.table:
            bytes_held.action = f"{action.kind} {action.stage} {action.microbatch}"
            if action.is_transfer:
                self._transfer(action)
            else:
                self._arrive(action)
                self.compute(action)
        for left in (*self.sent.values(), *self.proves.values()):
            bytes_held.drop(STREAM, left)
        bytes_held.action = "update"
        self.finish()
        # Offloaded states are updated on the host, but matrices are made whole on the device.
        with bytes_held.spike(UPDATE, update_workspace(program, self.at)):
            bytes_held.note("update")

    def finish(self) -> None:
        """Complete the gradient reductions after the last backward."""
        for units in self.units.values():
            units.finish()

    def compute(self, action: Action) -> None:
        """Simulate a computing action, whose input has arrived."""
        if action.kind == "F":
            self._forward(action)
        elif action.kind == "W":
            self._weights(action)
        else:
            self._backward(action, defers=action.kind == "I")
        self.bytes_held.note("end")

    def _transfer(self, action: Action) -> None:
        if action.kind in ("RECV_F", "RECV_B"):
            peer = self._peer(action)
            self.proves[action] = self.sent.pop(peer, 0)
            self.bytes_held.add(STREAM, self.sizes.stream_bytes)
            self.bytes_held.note("receive")
        else:
            peer = self._peer(action)
            self.sent[peer] = self.sent.get(peer, 0) + self.sizes.stream_bytes

    def _peer(self, action: Action) -> int:
        """Return the pipeline rank that a transfer comes from or goes to."""
        step = 1 if action.kind in ("SEND_F", "RECV_B") else -1
        return self.program.stage_ranks[action.stage + step]

    def _arrive(self, action: Action) -> None:
        """Release sent buffers that the receive of this action's input proves to have arrived."""
        kind: Kind = "RECV_F" if action.kind == "F" else "RECV_B"
        sent = 0
        if action.kind != "W":
            sent = self.proves.pop(Action(kind, action.stage, action.microbatch), 0)
        self.bytes_held.drop(STREAM, sent)

    def _forward(self, action: Action) -> None:
        bytes_held, stage = self.bytes_held, self.stages[action.stage]
        units = self.units[action.stage]
        if action.stage > 0:  # the first operation keeps it
            bytes_held.drop(STREAM, self.sizes.stream_bytes)
        units.enter_root()
        ops = self._of_ends(stage)
        self._keep(kept(op for op in ops if op.kind in ("embedding", "mask")))
        units.leave_embedding()
        for index in range(len(stage.layers)):
            self.forward_layer(action, index)
        if stage.is_last:
            units.enter_head()
            self._keep(kept(op for op in ops if op.name in ("norm", "head", "loss")))
        else:
            bytes_held.add(STREAM, self.sizes.stream_bytes)
        units.leave_root()

    def forward_layer(self, action: Action, index: int) -> None:
        """Simulate the forward of the `index`-th layer of the action's stage."""
        bytes_held, units = self.bytes_held, self.units[action.stage]
        layer = self.stages[action.stage].layers[index]
        units.enter(index)
        kind_bytes = self.layers[self.program.model.layer(layer)]
        self._keep(kind_bytes.kept)
        with bytes_held.spike("activations: product", kind_bytes.room):
            bytes_held.note(of_layer(layer))
        self.moves.leave(action, index)
        units.leave(index)

    def _of_ends(self, stage: Stage) -> tuple[Operation, ...]:
        """Return the operations of a stage outside of its layers."""
        if stage.index not in self.known:  # the same for all microbatches
            ends = replace(stage, stop_layer=stage.first_layer)  # without its layers
            self.known[stage.index] = operations(self.program, ends, cp_rank=self.at["cp"])
        return self.known[stage.index]

    def _keep(self, sizes: Iterable[Size]) -> None:
        for category, size in sizes:
            self.bytes_held.add(category, size)

    def _free(self, sizes: Iterable[Size]) -> None:
        for category, size in sizes:
            self.bytes_held.drop(category, size)

    def _backward(self, action: Action, defers: bool) -> None:
        bytes_held, stage = self.bytes_held, self.stages[action.stage]
        units, sizes = self.units[action.stage], self.sizes
        ops = self._of_ends(stage)
        units.begin_backward(is_last=action == self.ends[action.stage], defers=defers)
        if stage.is_last:
            self._loss(units)
            self._free(kept(op for op in ops if op.name in ("head", "loss")))
            self._last_norm(ops)
            units.leave_head_backward()
        # The gradient of the stream goes down through the layers.
        bytes_held.add("gradients of activations", sizes.stream_bytes if stage.is_last else 0)
        self.deferred[stage.index] = 0
        for index in reversed(range(len(stage.layers))):
            self.backward_layer(action, index)
        self._free(kept(op for op in ops if op.kind in ("embedding", "mask")))
        units.leave_root_backward()
        bytes_held.drop("gradients of activations", sizes.stream_bytes if stage.is_last else 0)
        if action.stage > 0:
            bytes_held.add(STREAM, sizes.stream_bytes)
        if action.stage < self.last:
            bytes_held.drop(STREAM, sizes.stream_bytes)

    def backward_layer(self, action: Action, index: int) -> None:
        """Simulate the backward of the `index`-th layer of the action's stage."""
        units, stage = self.units[action.stage], self.stages[action.stage]
        units.enter_backward(index)
        self.moves.come(action, index)
        self._through_layer(stage, index, defers=action.kind == "I")
        units.leave_backward(index)

    def _through_layer(self, stage: Stage, index: int, *, defers: bool) -> None:
        """Simulate the backward of a layer, with its recomputation before."""
        bytes_held, units, layer = self.bytes_held, self.units[stage.index], stage.layers[index]
        kind_bytes = self.layers[self.program.model.layer(layer)]
        if self.program.layout.recompute != "none":
            self._free(kind_bytes.kept)
            self._keep(kind_bytes.anew)  # its first operation keeps the block's input
        bytes_held.note(of_layer(layer))
        for need, freed in kind_bytes.backward:
            size = need.bytes + (-need.waiting if defers else need.room)
            with bytes_held.spike("gradients of activations", size):
                units.grow(index, need.weights)
                bytes_held.note(need.op)
            if defers and need.deferred:
                # What weights' gradients wait with: products' inputs, gradients of results.
                waits = need.deferred + sum(size for _, size in freed)
                self.deferred[stage.index] += waits
                bytes_held.add(DEFERRED, waits)
            self._free(freed)
        self._free(kind_bytes.left)

    def _loss(self, units: Units) -> None:
        """Simulate the loss and the head's backward, in chunks of tokens."""
        bytes_held, sizes = self.bytes_held, self.sizes
        element, whole_bytes = sizes.element, sizes.whole_bytes
        is_cut = self.program.layout.sp and self.program.layout.tp > 1
        is_capped = self.program.model.logits_softcap is not None
        is_fused = fuses_loss(element, self.program.layout.tp, self.program.target)
        rows = loss_rows(sizes.tokens, sizes.element, self.program.target)
        logits = rows * sizes.vocab
        name = "embed.weight" if self.program.model.tie_embeddings else "head.weight"
        is_frozen = not self.program.shardings[name].part.trained
        weight = 0 if is_frozen else sizes.dim * sizes.vocab * element
        made_bytes, travelling = of_input(self.program, sizes, gathers=is_cut)
        held_bytes = whole_bytes * (2 if is_cut else 1)  # the gradient of all rows, and its input
        before = weight if rows < sizes.tokens else 0
        room = loss_workspace(sizes, rows, self.program.target.products, is_frozen=is_frozen)
        for operation, size, rows_held, weight_held in (
            ("loss", loss_element(element, capped=is_capped, fused=is_fused), held_bytes, before),
            ("head: input", element, made_bytes, before),
            ("head", element, travelling, weight + room),
        ):
            with (
                bytes_held.spike(LOSS, logits * size),
                bytes_held.spike("gradients of activations", rows_held),
                bytes_held.spike(GRADIENTS, weight_held),
            ):
                bytes_held.note(operation)
        bytes_held.add("gradients of activations", sizes.stream_bytes)
        units.grow_root((name,))
        units.leave_loss()

    def _last_norm(self, ops: Sequence[Operation]) -> None:
        """Simulate the backward of the last norm."""
        wide = self.sizes.stream * self.sizes.dim * _WIDE
        with self.bytes_held.spike("gradients of activations", 3 * wide):
            self.bytes_held.note("norm")
        self._free(kept(op for op in ops if op.name == "norm"))
        self.bytes_held.drop("gradients of activations", self.sizes.stream_bytes)

    def _weights(self, action: Action) -> None:
        needs = [need for kind_bytes in self.layers.values() for need, _ in kind_bytes.backward]
        units = self.units[action.stage]
        units.grow_deferred(
            is_last=action == self.ends[action.stage],
            room=max((need.room for need in needs), default=0),
            added=max((need.added for need in needs), default=0),
        )
        self.bytes_held.drop(DEFERRED, self.deferred[action.stage])
        units.close_deferred()
