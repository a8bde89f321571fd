"""`Moves`: when activations that are offloaded to the host are in device memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshwright.cost.byte_count import ByteCount
from meshwright.program.actions import Action
from meshwright.program.layers.linears import gathers_again
from meshwright.program.lower import Program
from meshwright.program.operations import Operation, operations
from meshwright.program.sizes import Sizes
from meshwright.program.stages import Stage
from meshwright.spec.model import LayerSpec, ModelSpec

Moved = Mapping[str, int]
"""Bytes that leave the device, by category."""


class _Leaving(NamedTuple):
    """The layer whose saved tensors were copied to the host last: its stage, index (`place`) and
    microbatch."""

    stage: int
    place: int
    microbatch: int


class Moves:
    """Counts the saved tensors that leave the device for the host and come back, as
    `parallel.offload` does it.

    A layer's tensors leave at the end of its forward, and stay allocated until those of the next
    layer have left. During a layer's backward, its own tensors and those of the layer before are on
    the device.
    """

    def __init__(
        self, program: Program, stages: Mapping[int, Stage], cp_rank: int, bytes_held: ByteCount
    ) -> None:
        self._moves = program.layout.offload == "activations"
        self._program, self._stages, self._bytes_held = program, stages, bytes_held
        self._of: dict[LayerSpec, Moved] = {}
        self.leaving: _Leaving | None = None
        for stage in stages.values() if self._moves else ():
            ops = operations(program, stage, cp_rank=cp_rank)
            for kind in {op.layer for op in ops if op.layer is not None}:
                self._of[kind] = moved_bytes(op for op in ops if op.layer == kind)

    def _sizes(self, stage: Stage, index: int) -> Moved:
        moved = self._of[self._program.model.layer(stage.layers[index])]
        if index or not has_own_input(self._program.model, stage):
            return moved
        category, size = input_kept(self._program, Sizes.of(self._program))
        return {**moved, category: moved[category] - size} if size else moved

    def leave(self, action: Action, index: int) -> None:
        """Start the copy to the host after the forward of the action's `index`-th layer; the
        earlier copy ends."""
        if self._moves:
            self._let_go()
            self.leaving = _Leaving(action.stage, index, action.microbatch)

    def _let_go(self) -> None:
        if self.leaving is not None:
            stage = self._stages[self.leaving.stage]
            for category, size in self._sizes(stage, self.leaving.place).items():
                self._bytes_held.drop(category, size)
            self.leaving = None

    def come(self, action: Action, index: int) -> None:
        """Bring back the tensors for the backward of the action's `index`-th layer, and prefetch
        the layer's before."""
        if not self._moves:
            return
        stage = self._stages[action.stage]
        if self.leaving == (action.stage, index, action.microbatch):
            self.leaving = None
        elif index == len(stage.layers) - 1:
            self._let_go()
            self._fetch(stage, index)
        if index:
            self._fetch(stage, index - 1)

    def _fetch(self, stage: Stage, index: int) -> None:
        for category, size in self._sizes(stage, index).items():
            self._bytes_held.add(category, size)

    def before(self, action: Action) -> tuple[int, bool] | None:
        """Return the stage whose tensors left last, and whether the action is on the same stage and
        microbatch.

        None if no tensors are leaving.
        """
        left = self.leaving
        if left is None:
            return None
        return left.stage, (left.stage, left.microbatch) == (action.stage, action.microbatch)

    def skip(self, action: Action) -> None:
        """Set the state that performing the action would leave, without counting bytes."""
        layers = self._stages[action.stage].layers
        if self._moves and action.kind != "W" and layers:
            last = len(layers) - 1
            is_forward = action.kind == "F"
            leaving = _Leaving(action.stage, last, action.microbatch)
            self.leaving = leaving if is_forward else None


def moved_bytes(ops: Iterable[Operation]) -> Moved:
    """Return the bytes that operations copy to the host, by category."""
    sums: dict[str, int] = {}
    for op in ops:
        category = f"activations: {op.kind}"
        sums[category] = sums.get(category, 0) + op.moved_bytes
    return {category: size for category, size in sums.items() if size}


def has_own_input(model: ModelSpec, stage: Stage) -> bool:
    """Whether the input of a stage's first layer is not offloaded: with a frozen embedding it is a
    leaf of autograd."""
    return stage.is_first and model.lora is not None


def input_kept(program: Program, sizes: Sizes) -> tuple[str, int]:
    """Return the category and the bytes of a layer's input among the tensors that the layer
    saves."""
    layout, model = program.layout, program.model
    if layout.recompute != "none":
        return "activations: block", sizes.stream_bytes
    if model.norms_before:
        return "activations: norm", sizes.stream_bytes
    is_gathered = layout.sp and layout.tp > 1 and not gathers_again(program)
    return "activations: product", 0 if is_gathered else sizes.stream_bytes
