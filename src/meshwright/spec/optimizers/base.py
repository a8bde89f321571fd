"""An optimizer as data: its states per parameter, the costs of an update, and its names.

Plans, dry runs, checkpoints and training read the same data; `training.optimizers` implements the
update. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:  # `spec.training` looks up names here
    from meshwright.spec.parts import Part
    from meshwright.spec.training import OptimizerSpec

StateDtype = Literal["fp32", "bf16", "int8"]
_STATE_BYTES: Final[Mapping[StateDtype, int]] = {"fp32": 4, "bf16": 2, "int8": 1}
# Elements of a row that share a scale in 8 bits, at most: arXiv:2110.02861, section 2.1, has blocks
# of 2048; bitsandbytes and torchao have 256.
_BLOCK: Final = 256
_SCALE_BYTES: Final = 4
# The states that are never negative: in 8 bits, their roots are kept.
SQUARES: Final = frozenset({"exp_avg_sq"})
# Decades below 1 that the numbers of 8 bits cover: those of roots have one bit more, no sign.
_DECADES: Final = {False: 7, True: 8}
# Elements of a piece: an update that makes copies of what it updates does so for one at a time.
_PIECE: Final = 2**22
# What stochastic rounding of an element reads and writes, in passes over int32 tensors: the hash
# takes 20, its upper bits 4, adding them and clearing the lower ones 5; and its workspace.
HASHED_BYTES: Final = 4 * 29
HASH_WORKSPACE: Final = 8


@dataclass(frozen=True)
class State:
    """A state that an optimizer has for each parameter, by its key in torch's `Optimizer.state`.

    It is a tensor of `dtype` like a rank's shard. In int8, it has a scale in fp32 for each block of
    `block_width` elements of a row, by the key `scale_key`. With `is_number`, it is one number per
    parameter instead, the same on every rank; `if_absent` is its first value when a resumed step
    has none.
    """

    key: str
    dtype: StateDtype = "fp32"
    is_number: bool = False
    if_absent: float | None = None

    @property
    def element_bytes(self) -> int:
        """The bytes of one element, without scales."""
        return _STATE_BYTES[self.dtype]

    @property
    def scale_key(self) -> str:
        """The key of the scales of a state in int8."""
        return f"{self.key}_scale"


@dataclass(frozen=True)
class UpdateRule:
    """How an optimizer updates a class of parameters, such as matrices.

    `states` returns its states under a config's [optimizer]; `called` names them in tables. `moved`
    returns the bytes that an update reads and writes per element of a shard, each pass counted,
    `workspace` the temporary bytes per element of a piece (`rows_of_piece`), to which `rounding`
    adds while states are widened and rounded; all for weights and gradients in fp32. With
    `needs_matrix`, it needs whole matrices where a rank has shards, and `flops` returns those for
    one matrix of the given rows and columns.
    """

    name: str
    called: str
    states: Callable[[OptimizerSpec], tuple[State, ...]]
    moved: Callable[[OptimizerSpec], int]
    workspace: Callable[[OptimizerSpec], int] = field(default=lambda spec: 0)
    rounding: Callable[[OptimizerSpec], int] = field(default=lambda spec: 0)
    needs_matrix: bool = False
    flops: Callable[[OptimizerSpec, int, int], float] = field(default=lambda spec, rows, cols: 0.0)

    def element_bytes(self, spec: OptimizerSpec) -> int:
        """Return the bytes of all states per element, without scales."""
        return sum(state.element_bytes for state in self.states(spec) if not state.is_number)

    def block_bytes(self, spec: OptimizerSpec) -> int:
        """Return the bytes of the scales of all states per block (`block_width`)."""
        return _SCALE_BYTES * sum(state.dtype == "int8" for state in self.states(spec))

    def number_bytes(self, spec: OptimizerSpec) -> int:
        """Return the bytes of the states that are one number per parameter."""
        return sum(state.element_bytes for state in self.states(spec) if state.is_number)

    def state_bytes(self, spec: OptimizerSpec, elements: int, row: int) -> int:
        """Return the bytes of optimizer state that a rank stores for a shard of `elements`
        elements, in rows of `row` elements.
        """
        of_scales = elements // block_width(row) * self.block_bytes(spec)
        return elements * self.element_bytes(spec) + of_scales + self.number_bytes(spec)


def _first_rule(part: Part) -> int:
    return 0


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: its name in configs (`name`) and in texts (`label`), and its update rules.

    `rule_number` returns the index in `rules` of the rule for a parameter. `keys` are the keys of
    [optimizer] that it reads besides those of the learning rate and `weight_decay`, `defaults` its
    own defaults of keys. `names` are its names in other systems: `deepspeed`, `megatron`, `hf`,
    `torchtitan`.
    """

    name: str
    label: str
    rules: tuple[UpdateRule, ...]
    rule_number: Callable[[Part], int] = _first_rule
    keys: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def rule_of(self, part: Part) -> UpdateRule:
        """Return the rule that updates a parameter."""
        return self.rules[self.rule_number(part)]


def counted_if_rounded(spec: OptimizerSpec) -> tuple[State, ...]:
    """Return the number of updates, which stochastic rounding of weights hashes."""
    is_rounded = spec.rounding == "stochastic"
    return (State("step", is_number=True, if_absent=0.0),) if is_rounded else ()


@lru_cache(maxsize=1024)
def block_width(row: int) -> int:
    """Return the elements of a block of a row of `row` elements: the most up to 256 that divide it.

    So no block has elements of two rows, and a shard of whole rows has the blocks of the whole.
    """
    return next(width for width in range(min(row, _BLOCK), 0, -1) if row % width == 0) if row else 1


def numbers_of(key: str) -> list[float]:
    """Return the numbers between -1 and 1 that the codes 0, 1, ... of a state stand for.

    The highest decade has 64 numbers (of squares 128), each lower one half as many; all are the
    upper ends of equal intervals, so that 1 is among them. 0 is, too.
    """
    is_square = key in SQUARES
    positive = [
        10.0**-below * (0.1 + 0.9 * (number + 1) / count)
        for below in reversed(range(_DECADES[is_square]))
        for count in [2 ** (_DECADES[is_square] - 1 - below)]
        for number in range(count)
    ]
    negative = [] if is_square else [-number for number in reversed(positive)]
    return [*negative, 0.0, *positive]


def rows_of_piece(row: int) -> int:
    """Return how many rows of `row` elements an update processes at a time, at least one."""
    return max(_PIECE // max(row, 1), 1)
