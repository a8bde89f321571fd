"""What the units of a stage are: their sizes, and what changes of them as a step goes on."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import NamedTuple

from meshwright.program.lower import Program
from meshwright.program.shards import Sharding
from meshwright.program.stages import Stage
from meshwright.spec.model import LayerSpec


class UnitSizes:
    """A unit's parameters: elements whole on a tp rank, padded for the ranks that shard, a shard's
    with and without padding. Those of a block go by their names within it. ZeRO cuts them over
    `ranks`, and they are of experts that `ep` ranks share out."""

    def __init__(
        self, shardings: Mapping[str, Sharding], tp: int, at: int, is_block: bool = False
    ) -> None:
        self.is_block = is_block
        self.numels: dict[str, int] = {}
        self.padded = self.shard = self.own = 0
        self.ranks = max((one.shard_ranks for one in shardings.values()), default=1)
        self.ep = max((one.ep for one in shardings.values()), default=1)
        for name, sharding in shardings.items():
            rows, each = sharding.tp_shape[0], sharding.row_elements
            part = sharding.rows_each
            self.numels[name] = rows * each
            self.padded += sharding.padded_elements
            self.shard += part * each
            start = min(at // sharding.ep % self.ranks * part, rows)
            self.own += (min(start + part, rows) - start) * each
        self.whole = sum(self.numels.values())
        self.grown: dict[str, int] = {}  # bytes of an element of each gradient
        self.is_gathered = False
        self.accumulated = False
        self.has_shard_gradient = False

    def another(self) -> UnitSizes:
        """Return a unit of the same sizes, of which nothing is held."""
        made = copy(self)
        made.grown = {}
        return made


class UnitsState(NamedTuple):
    """What changes of `Units`: equal ones go on alike. It belongs to the units that made it."""

    units: tuple[tuple[tuple[tuple[str, int], ...], bool, bool, bool], ...]
    ahead: tuple[tuple[int, int], ...]
    kept: int
    input: int


def blocks_of(program: Program, stage: Stage, tp: int, place: int) -> list[tuple[UnitSizes, ...]]:
    """Return the units of each block of a stage; those of one kind have parameters of equal sizes.

    Experts that ranks share out are a unit of their own, the last one. `place` is the rank's among
    the layout's `alike_ranks`.
    """
    kinds: dict[LayerSpec, tuple[UnitSizes, ...]] = {}
    blocks = []
    for layer in stage.layers:
        kind = program.model.layer(layer)
        if kind not in kinds:
            units: dict[bool, dict[str, Sharding]] = {False: {}, True: {}}
            for name, sharding in program.of_layer(layer).items():
                units[sharding.ep > 1][name] = sharding
            found = [UnitSizes(one, tp, place, is_block=True) for one in units.values() if one]
            kinds[kind] = tuple(found)
        blocks.append(tuple(unit.another() for unit in kinds[kind]))
    return blocks


def waits(unit: UnitSizes, name: str) -> bool:
    """Whether a split backward makes a parameter's gradient in its second half."""
    return unit.is_block and "norm" not in name and name.endswith("weight")
