"""An optimizer as data: its states per parameter, the costs of an update, and its names.

Plans, dry runs, checkpoints and training read the same data; `training.optimizers` implements the
update. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:  # `spec.training` looks up names here
    from meshwright.spec.parts import Part
    from meshwright.spec.training import OptimizerSpec

StateDtype = Literal["fp32", "bf16"]
# Elements of a piece: an update that makes copies of what it updates does so for one at a time.
_PIECE: Final = 2**22
# What stochastic rounding of an element reads and writes, in passes over int32 tensors: the hash
# takes 20, its upper bits 4, adding them and clearing the lower ones 5; and its workspace.
HASHED_BYTES: Final = 4 * 29
HASH_WORKSPACE: Final = 8


@dataclass(frozen=True)
class State:
    """A state that an optimizer has for each parameter, by its key in torch's `Optimizer.state`.

    It is a tensor of `dtype` like a rank's shard. With `is_number`, it is one number per parameter
    instead, the same on every rank; `if_absent` is its first value when a resumed step has none.
    """

    key: str
    dtype: StateDtype = "fp32"
    is_number: bool = False
    if_absent: float | None = None

    @property
    def element_bytes(self) -> int:
        """The bytes of one element."""
        return 2 if self.dtype == "bf16" else 4


@dataclass(frozen=True)
class UpdateRule:
    """How an optimizer updates a class of parameters, such as matrices.

    `states` returns its states under a config's [optimizer]; `called` names them in tables. `moved`
    returns the bytes that an update reads and writes per element of a shard, each pass counted,
    `workspace` the temporary bytes per element of a piece (`rows_of_piece`); both for weights and
    gradients in fp32. With `needs_matrix`, it needs whole matrices where a rank has shards, and
    `flops` returns those for one matrix of the given rows and columns.
    """

    name: str
    called: str
    states: Callable[[OptimizerSpec], tuple[State, ...]]
    moved: Callable[[OptimizerSpec], int]
    workspace: Callable[[OptimizerSpec], int] = field(default=lambda spec: 0)
    needs_matrix: bool = False
    flops: Callable[[OptimizerSpec, int, int], float] = field(default=lambda spec, rows, cols: 0.0)

    def element_bytes(self, spec: OptimizerSpec) -> int:
        """Return the bytes of all states per element."""
        return sum(state.element_bytes for state in self.states(spec) if not state.is_number)

    def number_bytes(self, spec: OptimizerSpec) -> int:
        """Return the bytes of the states that are one number per parameter."""
        return sum(state.element_bytes for state in self.states(spec) if state.is_number)

    def state_bytes(self, spec: OptimizerSpec, elements: int) -> int:
        """Return the bytes of optimizer state that a rank stores for a shard of `elements`
        elements.
        """
        return elements * self.element_bytes(spec) + self.number_bytes(spec)


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


def rows_of_piece(row: int) -> int:
    """Return how many rows of `row` elements an update processes at a time, at least one."""
    return max(_PIECE // max(row, 1), 1)
