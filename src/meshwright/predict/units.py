"""`Units`: weights and gradients of a stage, as data parallelism gathers and reduces them.

A unit is a block, or what is left of the stage: the embedding, the last norm and the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from meshwright.predict.tally import Tally
from meshwright.program.lower import Program
from meshwright.program.operations import ELEMENT_BYTES
from meshwright.program.shards import Sharding, shard_rank, sums_in_place
from meshwright.program.stages import Stage

_FP32: Final = 4
_MOMENTS: Final = 8  # AdamW: two fp32 numbers, arXiv:1711.05101
_STEP: Final = 4  # and the number of its steps, for each parameter
WEIGHTS: Final = "weights"
GATHERED: Final = "gathered"
GRADIENTS: Final = "gradients"
BUFFERS: Final = "communication buffers"
OPTIMIZER: Final = "optimizer"


class _Unit:
    """A unit's parameters: elements whole on a tp rank, padded for the ranks that shard, a shard's
    with and without padding."""

    def __init__(self, shardings: Mapping[str, Sharding], tp: int, at: int) -> None:
        self.numels: dict[str, int] = {}
        self.padded = self.shard = self.own = 0
        for name, sharding in shardings.items():
            rows, *rest = sharding.tp_shape
            each = 1
            for size in rest:
                each *= size
            part = -(-rows // sharding.shard_ranks)
            self.numels[name] = rows * each
            self.padded += part * sharding.shard_ranks * each
            self.shard += part * each
            start = min(at * part, rows)
            self.own += (min(start + part, rows) - start) * each
        self.whole = sum(self.numels.values())
        self.grown: set[str] = set()
        self.is_gathered = False
        self.accumulated = False
        self.has_shard_gradient = False


class Units:
    """The units of one stage, and what of them is held."""

    def __init__(
        self,
        program: Program,
        stage: Stage,
        at: Mapping[str, int],
        tally: Tally,
        on_host: bool,
    ) -> None:
        layout, train = program.layout, program.train
        self.layout, self.tally = layout, tally
        self.element = ELEMENT_BYTES[train.precision]
        self.reduced = _FP32 if train.reduce_dtype == "fp32" else self.element
        self.in_place = sums_in_place(layout, on_cpu=on_host)
        self.is_stale = True
        self.offload = layout.offload
        # gloo works on a copy of what it gathers.
        self.copies = 2 if on_host else 1
        tp, place = layout.tp, shard_rank(layout, at) % layout.shard_ranks
        names = program.parameters(stage)
        found = {name: program.shardings[name] for name in names}

        def unit(prefix: str) -> _Unit:
            return _Unit({n: s for n, s in found.items() if n.startswith(prefix)}, tp, place)

        self.prefixes = [f"layers.{layer}." for layer in stage.layers]
        self.blocks = [unit(prefix) for prefix in self.prefixes]
        rest = {n: s for n, s in found.items() if not n.startswith("layers.")}
        self.root = _Unit(rest, tp, place)
        self.is_last = self.defers = False
        self._kept = 0  # the flat buffer of the last gathering of a forward
        self._ahead: dict[int, int] = {}  # flat buffers that were gathered ahead, by unit
        self._input = 0  # of the last reduction

    @property
    def all(self) -> list[_Unit]:
        """Blocks, then the root."""
        return [*self.blocks, self.root]

    def hold(self) -> None:
        """Count what lasts: weights and the optimizer's states."""
        for unit in self.all:
            weights = unit.shard
            if self.in_place and self.element == _FP32:
                weights = unit.padded
            elif self.in_place:  # beside the copy that products use
                self.tally.add(GATHERED, unit.padded * self.element)
                weights = unit.own
            self.tally.add(WEIGHTS, weights * _FP32 * (self.offload != "params"))
            states = unit.own * _MOMENTS + _STEP * len(unit.numels)
            self.tally.add(OPTIMIZER, states * (self.offload == "none"))

    def enter_root(self) -> None:
        """Gather the root for the forward, or once a step all units of whole weights."""
        if self.in_place and self.is_stale and self.layout.shard_ranks > 1:
            sent = sum((self.copies - 1) * unit.padded + unit.shard for unit in self.all)
            with self.tally.spike(BUFFERS, sent * self.element):
                self.tally.note("gather")
        self.is_stale = False
        self._gather(self.root, forward=True)

    def enter(self, index: int) -> None:
        """Gather a block for its forward."""
        self._gather(self.blocks[index], forward=True)

    def leave(self, index: int) -> None:
        """Drop a block after its forward, where ZeRO-3 does."""
        if self.layout.zero == 3:
            self._reshard(self.blocks[index])

    def leave_root(self) -> None:
        """End the forward of a stage."""
        self.tally.drop(BUFFERS, self._kept)
        self._kept = 0
        if self.layout.zero == 3:
            self._reshard(self.root)

    def begin_backward(self, is_last: bool, defers: bool) -> None:
        """Gather the root for the backward, and the last block ahead."""
        self.is_last, self.defers = is_last, defers
        self._gather(self.root)
        if self.blocks:
            self._gather_ahead(len(self.blocks) - 1)

    def enter_backward(self, index: int) -> None:
        """Take a block that was gathered ahead, and gather the one before it."""
        self._gather(self.blocks[index])
        if index:
            self._gather_ahead(index - 1)

    def leave_backward(self, index: int) -> None:
        """Accumulate or reduce the gradients of a block, and drop its weights where due."""
        self._close(self.blocks[index])

    def leave_root_backward(self) -> None:
        """Do so with the root; the last reduction's input stays until the next one."""
        names = [name for name in self.root.numels if name not in self.root.grown]
        self._grow(self.root, [name for name in names if "embed" in name])
        self._close(self.root)
        self._let_go()

    def grow(self, index: int, names: Sequence[str]) -> None:
        """Make the gradients of a block's parameters, or add to those that are there."""
        self._grow(self.blocks[index], [self.prefixes[index] + name for name in names])

    def grow_root(self, names: Sequence[str]) -> None:
        """Do so with the root."""
        self._grow(self.root, names)

    def finish_deferred(self, is_last: bool) -> None:
        """Make the gradients of all products, and reduce where due."""
        self.is_last, self.defers = is_last, False
        for unit in self.all:
            self._grow(unit, [name for name in unit.numels if _waits(name)])
            self._close(unit)
        self._let_go()

    def _let_go(self) -> None:
        """Let go of the last reduction's input at the end of a stage's last backward."""
        if self.is_last and not self.defers:
            self.tally.drop(BUFFERS, self._input)
            self._input = 0

    def finish(self) -> None:
        """End the backwards of a step."""

    def _gather(self, unit: _Unit, forward: bool = False) -> None:
        if self.in_place or unit.is_gathered:
            return
        tally, size = self.tally, unit.padded * self.element
        unit.is_gathered = True
        if self.layout.shard_ranks == 1 or not size:
            tally.add(GATHERED, size)
            return
        if id(unit) not in self._ahead:
            self._begin_gather(unit)
        flat = self._ahead.pop(id(unit))
        tally.drop(BUFFERS, flat - size)
        if forward:
            tally.drop(BUFFERS, self._kept)
            self._kept = size
        tally.add(GATHERED, size)
        tally.note("gather")
        if not forward:
            tally.drop(BUFFERS, size)

    def _gather_ahead(self, index: int) -> None:
        unit = self.blocks[index]
        has_to = not (self.in_place or unit.is_gathered or id(unit) in self._ahead)
        if has_to and self.layout.shard_ranks > 1:
            self._begin_gather(unit)

    def _begin_gather(self, unit: _Unit) -> None:
        flat = unit.padded * self.element * self.copies
        self.tally.add(BUFFERS, flat)
        self._ahead[id(unit)] = flat
        with self.tally.spike(BUFFERS, unit.shard * self.element * (self.element < _FP32)):
            self.tally.note("gather")

    def _reshard(self, unit: _Unit) -> None:
        if unit.is_gathered:
            unit.is_gathered = False
            self.tally.drop(GATHERED, unit.padded * self.element)

    def _grow(self, unit: _Unit, names: Sequence[str]) -> None:
        if self.defers:
            names = [name for name in names if not _waits(name)]
        size, widens = self.element, self.in_place and self.element < self.reduced
        names = [name for name in names if name in unit.numels]
        for name in names:  # they come together
            self.tally.add(GRADIENTS, unit.numels[name] * size)
        for name in names:
            if widens and name not in unit.grown:
                self.tally.add(GRADIENTS, unit.numels[name] * self.reduced)
            if widens or name in unit.grown:
                self.tally.note("gradient")
                self.tally.drop(GRADIENTS, unit.numels[name] * size)
            unit.grown.add(name)

    def _close(self, unit: _Unit) -> None:
        if self.in_place:
            return
        zero = self.layout.zero
        if self.is_last or zero == 3:
            self._reshard(unit)
        if self.defers:
            return
        if self.is_last or zero >= 2:
            self._reduce(unit)
        elif self.element != self.reduced:
            self._widen(unit)

    def _widen(self, unit: _Unit) -> None:
        """Keep the gradients in the dtype of the reduction."""
        if not unit.accumulated:
            self.tally.add(GRADIENTS, unit.whole * self.reduced)
            unit.accumulated = True
            self.tally.note("widen")
        self._drop_grown(unit)

    def _drop_grown(self, unit: _Unit) -> None:
        size = sum(unit.numels[name] for name in unit.grown)
        self.tally.drop(GRADIENTS, size * self.element)
        unit.grown.clear()

    def _reduce(self, unit: _Unit) -> None:
        if not unit.numels:  # no unit to torch: the last reduction's input stays
            return
        tally, size = self.tally, unit.padded * self.reduced
        if unit.accumulated:
            self._drop_grown(unit)
        tally.drop(BUFFERS, self._input)
        tally.add(BUFFERS, size)
        tally.note("reduce")
        self._input = size
        if unit.accumulated:
            tally.drop(GRADIENTS, unit.whole * self.reduced)
            unit.accumulated = False
        else:
            self._drop_grown(unit)
        out = unit.shard * self.reduced
        with tally.spike(BUFFERS, out):
            with tally.spike(BUFFERS, size):
                tally.note("reduce")
            if self.reduced < _FP32:
                with tally.spike(BUFFERS, unit.shard * _FP32):
                    tally.note("reduce")
        if not unit.has_shard_gradient and self.offload != "params":
            tally.add(GRADIENTS, unit.shard * _FP32)
        unit.has_shard_gradient = True


def _waits(name: str) -> bool:
    """Whether a split backward makes a parameter's gradient in its second half."""
    return name.startswith("layers.") and "norm" not in name and name.endswith("weight")
