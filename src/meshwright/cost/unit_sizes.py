"""Sizes and state of a stage's units: the groups of weights that data parallelism gathers
together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import NamedTuple

from meshwright.program.float8 import FLOAT8_BYTES, gathers_float8, is_in_float8
from meshwright.program.lower import Program
from meshwright.program.optimizer import rule_of
from meshwright.program.shards import Sharding
from meshwright.program.stages import Stage
from meshwright.spec.model import LayerSpec
from meshwright.spec.training import OptimizerSpec


class Counted(NamedTuple):
    """Numbers of elements on a tp rank: in all, with padding for sharding, and of the rank's shard
    with and without padding."""

    whole: int
    padded: int
    shard: int
    own: int

    @classmethod
    def of(cls, shardings: Iterable[Sharding], place: int) -> Counted:
        """Return the numbers for some parameters; `place` is the rank's index among data ranks with
        the same weights."""
        total = padded = shard = unpadded = 0
        for sharding in shardings:
            rows, row_elements, part = (
                sharding.tp_shape[0],
                sharding.row_elements,
                sharding.rows_each,
            )
            total += rows * row_elements
            padded += sharding.padded_elements
            shard += part * row_elements
            start = min(place // sharding.expert_data % sharding.shard_ranks * part, rows)
            unpadded += (min(start + part, rows) - start) * row_elements
        return cls(total, padded, shard, unpadded)


class UnitSizes:
    """The sizes of a unit's trained and frozen parameters, and the state of its weights and
    gradients.

    `numels` has the trained parameters by name. ZeRO shards them over `ranks` ranks, and
    `expert_data` data ranks divide the experts among themselves. With `rounded`, weights of float8
    matmuls are gathered in float8. `state_bytes` are those of the optimizer's states.
    """

    def __init__(
        self,
        shardings: Mapping[str, Sharding],
        optimizer: OptimizerSpec,
        tp: int,
        place: int,
        is_block: bool = False,
        rounded: bool = False,
    ) -> None:
        self.is_block, self.is_there = is_block, bool(shardings)
        self.ranks = max((sharding.shard_ranks for sharding in shardings.values()), default=1)
        self.expert_data = max((sharding.expert_data for sharding in shardings.values()), default=1)
        trained = {name: sharding for name, sharding in shardings.items() if sharding.part.trained}
        self.numels = {name: math.prod(sharding.tp_shape) for name, sharding in trained.items()}
        self.whole, self.padded, self.shard, self.own = Counted.of(trained.values(), place)
        self.state_bytes = sum(
            rule_of(optimizer, sharding.part).state_bytes(
                optimizer, Counted.of([sharding], place).own, sharding.tp_shape[-1]
            )
            for sharding in trained.values()
        )
        frozen = [sharding for name, sharding in shardings.items() if name not in trained]
        self.frozen = Counted.of(frozen, place)
        in_float8 = [
            sharding for sharding in trained.values() if rounded and is_in_float8(sharding.part)
        ]
        self.float8 = Counted.of(in_float8, place)
        packed = [sharding for sharding in frozen if sharding.part.is_nf4]
        self.packed = sum(math.prod(sharding.tp_shape) for sharding in packed)
        self.packed_bytes = sum(sharding.stored_bytes(1) for sharding in packed)
        self.cuts_frozen = any(sharding.shard_ranks > 1 for sharding in frozen)
        self.grown: dict[str, int] = {}  # bytes of an element of each gradient
        self.is_gathered = False
        self.accumulated = False
        self.summed = 0  # bytes of the sums of its shard's gradients

    def lasting(self, in_place: bool, element: int) -> int:
        """Return the bytes of frozen weights that a rank holds at all times; `element` is in
        bytes."""
        if not self.cuts_frozen:
            return (self.frozen.whole - self.packed) * element + self.packed_bytes
        return (self.frozen.own if in_place else self.frozen.shard) * element

    def gathered(self, in_place: bool, element: int) -> int:
        """Return the bytes of the gathered weights, with `element` bytes for each outside of
        float8."""
        if in_place:
            return (self.whole + self.frozen.whole * self.cuts_frozen) * element
        count = self.padded + self.frozen.padded * self.cuts_frozen
        return count * element - self.float8.padded * (element - FLOAT8_BYTES)

    def sent(self, element: int) -> int:
        """Return the bytes of this rank's shard in a gather, with `element` bytes per element
        outside of float8."""
        return self.shard * element - self.float8.shard * (element - FLOAT8_BYTES)

    @property
    def grown_bytes(self) -> int:
        """The bytes of the unit's existing gradients, in the dtype that each has now."""
        return sum(self.numels[name] * element_bytes for name, element_bytes in self.grown.items())

    def last_gradient(self, reduced: int) -> int:
        """Return the bytes of the last gradient, with `reduced` bytes per element if it is
        accumulated.

        A loop variable of torch's `foreach_reduce` keeps it until the reduction is done.
        """
        if self.accumulated:
            return next(reversed(self.numels.values())) * reduced
        grown = [self.numels[name] * self.grown[name] for name in self.numels if name in self.grown]
        return grown[-1] if grown else 0

    def another(self) -> UnitSizes:
        """Return a copy of the unit without gradients."""
        copied = copy(self)
        copied.grown = {}
        return copied


class UnitsState(NamedTuple):
    """The state of some units: their gradients, whether they are gathered, and communication
    buffers.

    Units of equal sizes and states behave the same. `ahead` has the prefetched bytes by the index
    of a unit.
    """

    units: tuple[tuple[tuple[tuple[str, int], ...], bool, bool, int], ...]
    ahead: tuple[tuple[int, int], ...]
    kept: int
    input: int

    @classmethod
    def of(
        cls, units: Sequence[UnitSizes], ahead: Mapping[int, int], buffer: int, input: int
    ) -> UnitsState:
        """Return the state of some units, with prefetched bytes by unit, and the bytes of the last
        gather's and the last reduction's buffer."""
        unit_states = tuple(
            (tuple(unit.grown.items()), unit.is_gathered, unit.accumulated, unit.summed)
            for unit in units
        )
        prefetched = tuple(
            (n, ahead[id(unit)]) for n, unit in enumerate(units) if id(unit) in ahead
        )
        return cls(unit_states, prefetched, buffer, input)

    def restore(self, units: Sequence[UnitSizes]) -> dict[int, int]:
        """Put units into this state, and return their prefetched bytes by `id`."""
        for unit, state in zip(units, self.units, strict=True):
            grown, unit.is_gathered, unit.accumulated, unit.summed = state
            unit.grown = dict(grown)
        return {id(units[place]): size for place, size in self.ahead}


def blocks_of(program: Program, stage: Stage, tp: int, place: int) -> list[tuple[UnitSizes, ...]]:
    """Return the units of each block of a stage; blocks of the same kind have equal sizes.

    Expert-parallel experts are a separate unit, the last one. `place` is the rank's index among the
    layout's `alike_ranks`.
    """
    rounded = gathers_float8(program.train, program.layout, program.target)
    kinds: dict[LayerSpec, tuple[UnitSizes, ...]] = {}
    blocks = []
    for layer in stage.layers:
        kind = program.model.layer(layer)
        if kind not in kinds:
            units: dict[bool, dict[str, Sharding]] = {False: {}, True: {}}
            for name, sharding in program.of_layer(layer).items():
                units[sharding.ep > 1][name] = sharding
            kinds[kind] = tuple(
                UnitSizes(shardings, program.optimizer, tp, place, is_block=True, rounded=rounded)
                for shardings in units.values()
                if shardings
            )
        blocks.append(tuple(unit.another() for unit in kinds[kind]))
    return blocks


def waits(unit: UnitSizes, name: str) -> bool:
    """Whether a split backward computes a parameter's gradient in its second half."""
    return unit.is_block and "norm" not in name and name.endswith("weight")
