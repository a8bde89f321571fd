"""`Units`: weights and gradients of a stage, as data parallelism gathers and reduces them.

A unit is a block, the embedding, or the rest of the stage: the last norm and the head. With FSDP2,
the head is a separate unit, too; a tied embedding belongs to the rest. "In place" is the engine for
CPU ranks: without FSDP2, ranks exchange shards and sum whole gradients by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from meshwright.cost.byte_count import ByteCount
from meshwright.cost.unit_sizes import UnitSizes, UnitsState, blocks_of, waits
from meshwright.program.lower import Program
from meshwright.program.shards import EMBED, HEAD, Sharding, cuts_frozen, data_rank
from meshwright.program.sizes import ELEMENT_BYTES
from meshwright.program.stages import Stage
from meshwright.program.zero_collectives import unit_in

WEIGHTS: Final = "weights"
GATHERED: Final = "gathered"
GRADIENTS: Final = "gradients"
BUFFERS: Final = "communication buffers"
OPTIMIZER: Final = "optimizer"


class Units:
    """The units of one stage on a rank; its methods follow a step and count allocated bytes in
    `bytes_held`."""

    def __init__(
        self,
        program: Program,
        stage: Stage,
        coordinates: Mapping[str, int],
        bytes_held: ByteCount,
    ) -> None:
        layout, train = program.layout, program.train
        self.layout, self.bytes_held = layout, bytes_held
        self.element = ELEMENT_BYTES[train.precision]
        self.reduced = ELEMENT_BYTES[train.reduced_dtype]
        # Of what the optimizer trains and reads.
        self.weight = ELEMENT_BYTES[train.weight_dtype]
        self.gradient = ELEMENT_BYTES[train.gradient_dtype]
        self.in_place = not program.target.uses_fsdp2(layout)
        # An exchange is completed by the next one; sums end while the rank goes on.
        self.waits = self.in_place and layout.shard_ranks > 1
        self.offload = layout.offload
        # gloo works on a copy of what it gathers for FSDP2, and of what it sums for all.
        self.copies = 2 if program.target.traits.reduces_copies else 1
        tp, place = layout.tp, data_rank(layout, coordinates)
        ends: dict[str, dict[str, Sharding]] = {}
        for name in program.parameters(stage):
            if not name.startswith("layers."):
                of_unit = ends.setdefault(unit_in(program, name), {})
                of_unit[name] = program.shardings[name]
        self.blocks = blocks_of(program, stage, tp, place)
        # Without an end of its own it is a unit of nothing.
        self.embed, self.root, self.head = (
            UnitSizes(ends.get(name, {}), program.optimizer, tp, place)
            for name in (EMBED, "rest", HEAD)
        )
        turns = [(self.embed,), *self.blocks, (self.root, self.head)]
        # What is needed together, in the order of the forward.
        self._turns = [[unit for unit in turn if unit.is_there] for turn in turns]
        self.all = [unit for turn in self._turns for unit in turn]
        for unit in self.all:  # a rank alone, too, gathers what is on the host
            unit.cuts_frozen |= layout.offload == "params" and cuts_frozen(layout)
        order = [self.root, *(unit for turn in self._turns[:-1] for unit in turn)]
        self._after = {id(unit): after for unit, after in pairwise(order) if unit.is_there}
        self.is_last = self.defers = self.meets = False
        self._kept = 0  # the flat buffer of the last gathering of a forward
        self._ahead: dict[int, int] = {}  # flat buffers that were gathered ahead, by unit
        self._input = 0  # of the last reduction, or all of the last exchange

    def state_of(self, units: Sequence[UnitSizes]) -> UnitsState:
        """Return the state of some units, and the buffers that the last messages still use."""
        return UnitsState.of(units, self._ahead, self._kept, self._input)

    def restore(self, units: Sequence[UnitSizes], state: UnitsState) -> None:
        """Put some units into a state that `state_of` returned."""
        for unit in units:
            self._ahead.pop(id(unit), None)
        self._ahead.update(state.restore(units))
        self._kept, self._input = state.kept, state.input

    def _exchanges(self, unit: UnitSizes) -> bool:
        """Whether the unit is sharded and, without FSDP2, its ranks exchange the shards
        themselves."""
        return self.in_place and unit.ranks > 1

    def _reshards(self, unit: UnitSizes) -> bool:
        """Whether the unit's weights are, without FSDP2, gathered only while they are needed
        (ZeRO-3)."""
        return self._exchanges(unit) and self.layout.zero == 3

    def _sums(self, unit: UnitSizes) -> bool:
        """Whether, without FSDP2, ranks that hold the whole unit all-reduce its gradients in
        place."""
        copies = self.layout.dp * self.layout.cp // unit.expert_data
        return self.in_place and unit.ranks == 1 and copies > 1

    def hold(self) -> None:
        """Count what a rank holds during the whole step: weights and optimizer states."""
        for unit in self.all:
            weights = unit.shard
            if self._reshards(unit):
                weights = unit.own
            elif self.in_place and self.element == self.weight:
                weights = unit.whole
            elif self.in_place:  # beside the copy that products use
                self.bytes_held.add(GATHERED, unit.whole * self.element)
                weights = unit.own
            size = weights * self.weight + unit.lasting(self.in_place, self.element)
            self.bytes_held.add(WEIGHTS, size * (self.offload != "params"))
            self.bytes_held.add(OPTIMIZER, unit.state_bytes * (not self.layout.states_on_host))

    def enter_root(self) -> None:
        """Gather the weights outside of blocks for a forward; without FSDP2, only the
        embedding's."""
        self._need(0)
        self._take((self.root, self.embed))

    def leave_embedding(self) -> None:
        """Release the gathered embedding after its forward, with FSDP2 and ZeRO-3."""
        if self.layout.zero == 3 and not self.in_place:
            self._reshard(self.embed)

    def enter(self, index: int) -> None:
        """Gather the `index`-th block for its forward."""
        self._need(index + 1)
        self._take(self.blocks[index])

    def _take(self, units: Sequence[UnitSizes]) -> None:
        """Gather units for their forward, and begin to gather the one after each (FSDP2)."""
        for unit in units:
            self._gather(unit, forward=True)
            if id(unit) in self._after:
                self._gather_ahead(self._after[id(unit)])

    def enter_head(self) -> None:
        """Gather the last norm and the head for their forward, without FSDP2."""
        self._need(len(self.blocks) + 1)

    def _need(self, turn: int) -> None:
        """Gather the units of a turn of the forward that are not gathered, and begin the next
        turn's (no FSDP2)."""
        if not self.waits or not self._turns[turn]:
            return
        later = [units for units in self._turns[turn:] if units]
        if len(later) == 1:
            self._settle()
        for unit in (unit for units in later[:2] for unit in units):
            self._begin(unit)

    def _begin(self, unit: UnitSizes) -> None:
        """Begin to gather a unit, without FSDP2."""
        if unit.is_gathered or not self._exchanges(unit):
            return
        unit.is_gathered = True
        self.bytes_held.add(GATHERED, unit.gathered(True, self.element) * self._reshards(unit))
        self.bytes_held.note("gather")

    def leave(self, index: int) -> None:
        """Release the gathered weights of the `index`-th block after its forward, with ZeRO-3."""
        for unit in self.blocks[index]:
            if self._reshards(unit) or (self.layout.zero == 3 and not self.in_place):
                self._reshard(unit)

    def leave_root(self) -> None:
        """Release the gather buffer and, with FSDP2 and ZeRO-3, the root's weights at the end of a
        stage's forward."""
        self.bytes_held.drop(BUFFERS, self._kept)
        self._kept = 0
        if self.layout.zero == 3 and not self.in_place:
            self._reshard(self.root)

    def begin_backward(self, is_last: bool, defers: bool) -> None:
        """Gather the root unit for a backward, and prefetch the head and the last block.

        `is_last` says that it is the stage's last backward of the step, `defers` that it leaves
        weight gradients for later.
        """
        self.is_last, self.defers = is_last, defers
        self.meets = is_last or self.layout.dp_replicate == 1  # replicas sum with each other
        self._gather(self.root)
        self._gather_ahead(self.head)
        if self.blocks:
            self._begin_again(len(self.blocks) - 1)
            self._gather_ahead(self.blocks[-1][0])
        self._gather(self.head)

    def _begin_again(self, index: int) -> None:
        """Begin to gather the released weights of a block, without FSDP2."""
        for unit in filter(self._reshards, self.blocks[index]):
            self._begin(unit)

    def _drop(self, index: int) -> None:
        """Release the gathered weights of a block, without FSDP2."""
        for unit in filter(self._reshards, self.blocks[index]):
            self._reshard(unit)

    def enter_backward(self, index: int) -> None:
        """Gather the `index`-th block for its backward, and prefetch the block before it."""
        if index + 1 < len(self.blocks):
            self._drop(index + 1)
        self._begin_again(index)
        for unit in self.blocks[index]:
            self._gather(unit)
        if index:
            self._begin_again(index - 1)
            self._gather_ahead(self.blocks[index - 1][0])

    def leave_loss(self) -> None:
        """Reduce or accumulate the head's gradients after the loss, if the head is a unit."""
        if self.head.is_there:
            self._close(self.head)

    def leave_head_backward(self) -> None:
        """Reduce or accumulate the gradients of last norm and head after their backward, without
        FSDP2."""
        if self.in_place:
            self._close(self.root)

    def leave_backward(self, index: int) -> None:
        """Reduce or accumulate the gradients of the `index`-th block, and release its weights if
        due."""
        for unit in reversed(self.blocks[index]):
            self._close(unit)

    def leave_root_backward(self) -> None:
        """Reduce or accumulate the gradients of the units outside of blocks at the end of a stage's
        backward."""
        if self.blocks:
            self._drop(0)
        last = (self.embed,) if self.in_place else (self.root, self.embed)
        for unit in last:
            names = [name for name in unit.numels if EMBED in name and name not in unit.grown]
            self._grow(unit, names)
        for unit in last:
            self._close(unit)
        if self.is_last and not self.defers and not self.waits:
            self._settle()

    def grow(self, index: int, names: Sequence[str]) -> None:
        """Count the gradients of the named parameters of the `index`-th block, which a backward
        allocates at first and accumulates into later."""
        for unit in self.blocks[index]:
            self._grow(unit, names)

    def grow_root(self, names: Sequence[str]) -> None:
        """Count the gradients of the named parameters outside of blocks, as `grow` does."""
        for unit in (self.embed, self.root, self.head):
            self._grow(unit, names)

    def grow_deferred(self, is_last: bool, room: int, added: int) -> None:
        """Allocate the deferred gradients of all matmul weights; with FSDP2, reduces those of a
        unit if due.

        A matmul that creates a gradient needs a workspace of `room` bytes, one that adds to it
        `added`.
        """
        self.is_last, self.defers, self.meets = is_last, False, True
        for unit in self.all:
            names = [name for name in unit.numels if waits(unit, name)]
            # Those in the dtype of products are added to by the products themselves.
            new = [name for name in names if unit.grown.get(name) != self.element]
            self._grow(unit, new, joins=True)
            with self.bytes_held.spike(GRADIENTS, room if new else added):
                self.bytes_held.note("gradient")
            if not self.in_place:
                self._close(unit)

    def close_deferred(self) -> None:
        """Exchange or sum the deferred gradients if due, after the saved tensors were released (no
        FSDP2)."""
        for unit in reversed(self.all if self.in_place else []):
            self._close(unit)
        if self.is_last and not self.waits:
            self._settle()

    def _settle(self, following: int = 0) -> None:
        """Release the buffers of the last reduction or exchange, and allocate `following` bytes for
        the next."""
        self.bytes_held.drop(BUFFERS, self._input)
        self.bytes_held.add(BUFFERS, following)
        self._input = following

    def finish(self) -> None:
        """Release all communication buffers and gathered shards at the end of the step's
        backwards."""
        self._settle()
        for unit in filter(self._reshards, self.all):
            self._reshard(unit)

    def _gather(self, unit: UnitSizes, forward: bool = False) -> None:
        if self.in_place or unit.is_gathered:
            return
        bytes_held, size = self.bytes_held, unit.gathered(self.in_place, self.element)
        unit.is_gathered = True
        if unit.ranks == 1 or not size:
            bytes_held.add(GATHERED, size)
            return
        if id(unit) not in self._ahead:
            self._begin_gather(unit)
        self._ahead.pop(id(unit))
        if forward:
            bytes_held.drop(BUFFERS, self._kept)
            self._kept = size
        bytes_held.add(GATHERED, size)
        bytes_held.note("gather")
        if not forward:
            bytes_held.drop(BUFFERS, size)

    def _gather_ahead(self, unit: UnitSizes) -> None:
        if not (self.in_place or unit.is_gathered or id(unit) in self._ahead) and unit.ranks > 1:
            self._begin_gather(unit)

    def _begin_gather(self, unit: UnitSizes) -> None:
        self._ahead[id(unit)] = flat = unit.gathered(self.in_place, self.element)
        self.bytes_held.add(BUFFERS, flat)
        narrow = unit.sent(self.element) * (self.element < self.weight)
        with self.bytes_held.spike(BUFFERS, flat * (self.copies - 1) + narrow):
            self.bytes_held.note("gather")

    def _reshard(self, unit: UnitSizes) -> None:
        if unit.is_gathered:
            unit.is_gathered = False
            self.bytes_held.drop(GATHERED, unit.gathered(self.in_place, self.element))

    def _grow(self, unit: UnitSizes, names: Sequence[str], *, joins: bool = False) -> None:
        """Allocate or accumulate gradients; with `joins`, they are kept in the dtype of the
        reduction."""
        if self.defers:
            names = [name for name in names if not waits(unit, name)]
        size, widens = self.element, self.in_place and self.element < self.reduced
        names = [name for name in names if name in unit.numels]
        for name in names:  # they come together
            self.bytes_held.add(GRADIENTS, unit.numels[name] * size)
        for name in names:
            count, existing = unit.numels[name], unit.grown.get(name, 0)
            to_be_wide = widens and (joins or existing > 0 or not self._is_sent_at_once(unit))
            if to_be_wide and not existing:
                self.bytes_held.add(GRADIENTS, count * self.reduced)
            if to_be_wide or existing:
                self.bytes_held.note("gradient")
                self.bytes_held.drop(GRADIENTS, count * size)
            unit.grown[name] = self.reduced if to_be_wide else size

    def _is_sent_at_once(self, unit: UnitSizes) -> bool:
        """Whether this backward's gradients are exchanged as soon as they are computed (no
        FSDP2)."""
        return (self.is_last or self.layout.zero >= 2) and not self.defers and self._exchanges(unit)

    def _close(self, unit: UnitSizes) -> None:
        if self.in_place:
            if self._is_sent_at_once(unit) and unit.grown:
                self._exchange(unit)
            elif self._sums(unit) and unit.is_there and self.is_last and not self.defers:
                self._settle(unit.whole * self.reduced * (self.copies - 1))
                self.bytes_held.note("reduce")
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

    def _exchange(self, unit: UnitSizes) -> None:
        """Send the other ranks their rows of a unit's gradients, and receive this rank's rows from
        each."""
        bytes_held = self.bytes_held
        self._settle((unit.whole + (unit.ranks - 2) * unit.own) * self.reduced)
        bytes_held.add(GRADIENTS, unit.own * self.gradient - unit.summed)
        unit.summed = unit.own * self.gradient
        bytes_held.note("reduce")
        self._drop_grown(unit)

    def _widen(self, unit: UnitSizes) -> None:
        """Cast the gradients up to the dtype of the reduction, in which they are accumulated."""
        if not unit.accumulated:
            self.bytes_held.add(GRADIENTS, unit.whole * self.reduced)
            unit.accumulated = True
            self.bytes_held.note("widen")
        self._drop_grown(unit)

    def _drop_grown(self, unit: UnitSizes) -> None:
        self.bytes_held.drop(GRADIENTS, unit.grown_bytes)
        unit.grown.clear()

    def _reduce(self, unit: UnitSizes) -> None:
        if not unit.numels:  # no unit to torch: the last reduction's input stays
            return
        bytes_held, size = self.bytes_held, unit.padded * self.reduced
        if unit.accumulated:
            self._drop_grown(unit)
        self._settle(size)
        bytes_held.note("reduce")
        last = unit.last_gradient(self.reduced)
        if unit.accumulated:
            bytes_held.drop(GRADIENTS, unit.whole * self.reduced)
            unit.accumulated = False
        else:
            self._drop_grown(unit)
        out = unit.shard * self.reduced
        with bytes_held.spike(BUFFERS, out), bytes_held.spike(GRADIENTS, last):
            with bytes_held.spike(BUFFERS, size):
                bytes_held.note("reduce")
            if self.reduced < self.gradient:
                with bytes_held.spike(BUFFERS, unit.shard * self.gradient):
                    bytes_held.note("reduce")
        # Until replicas meet, FSDP2 keeps the sum of a shard group on the device, in any case.
        size = self.gradient * (self.offload != "params") if self.meets else self.reduced
        bytes_held.add(GRADIENTS, unit.shard * size - unit.summed)
        unit.summed = unit.shard * size
