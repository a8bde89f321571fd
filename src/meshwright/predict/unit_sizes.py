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
    with and without padding. Those of a block go by their names within it."""

    def __init__(
        self, shardings: Mapping[str, Sharding], tp: int, at: int, is_block: bool = False
    ) -> None:
        self.is_block = is_block
        self.numels: dict[str, int] = {}
        self.padded = self.shard = self.own = 0
        for name, sharding in shardings.items():
            rows, each = sharding.tp_shape[0], sharding.row_elements
            part = sharding.rows_each
            self.numels[name] = rows * each
            self.padded += sharding.padded_elements
            self.shard += part * each
            start = min(at * part, rows)
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


def blocks_of(program: Program, stage: Stage, tp: int, place: int) -> list[UnitSizes]:
    """Return the blocks of a stage; those of one kind have parameters of the same sizes."""
    kinds: dict[LayerSpec, UnitSizes] = {}
    blocks = []
    for layer in stage.layers:
        kind = program.model.layer(layer)
        if kind not in kinds:
            found = program.of_layer(layer)
            kinds[kind] = UnitSizes(found, tp, place, is_block=True)
        blocks.append(kinds[kind].another())
    return blocks


def waits(unit: UnitSizes, name: str) -> bool:
    """Whether a split backward makes a parameter's gradient in its second half."""
    return unit.is_block and "norm" not in name and name.endswith("weight")
