"""`lower`: from specs and a layout to the `Program` that pricing, dry run, training and proofs
read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from meshwright.layout import Layout
from meshwright.program.optimizer import rule_of
from meshwright.program.schedule import (
    KEPT_TABLES,
    Table,
    compute_tables,
    stage_ranks,
    with_transfers,
)
from meshwright.program.shards import Sharding, shard
from meshwright.program.stages import Stage, split_stages
from meshwright.program.target import Target
from meshwright.spec.model import ModelSpec, padded
from meshwright.spec.optimizers import UpdateRule
from meshwright.spec.parts import names_by_layer, parts
from meshwright.spec.training import OptimizerSpec, TrainSpec

# CPUs, torch's own kernels.
_ANY: Final = Target()
# What of a layout does not change how a parameter lies on the ranks of its stage.
_WHOLE_ON_A_RANK: Final = {
    "pp": 1,
    "schedule": "1f1b",
    "virtual_stages": 1,
    "microbatch": 1,
    "recompute": "none",
    "cp_kind": "ring",
}


@dataclass(frozen=True)
class Program:
    """What every rank holds, computes and sends in one optimizer step.

    Cheap to create: expensive parts (tables of many microbatches) are computed on first use.
    """

    model: ModelSpec
    train: TrainSpec
    optimizer: OptimizerSpec
    layout: Layout
    stages: tuple[Stage, ...]
    target: Target = _ANY

    @property
    def microbatches(self) -> int:
        """Microbatches of a data-parallel rank in one step."""
        return self.layout.microbatches(self.train.batch)

    @property
    def sequence(self) -> int:
        """Tokens of a sequence on a rank in attention and matmuls: its share over cp."""
        return self.train.seq_len // self.layout.cp

    @property
    def stream(self) -> int:
        """Tokens of a sequence in a rank's residual stream: `sequence`, sharded over tp with sp."""
        return self.sequence // (self.layout.tp if self.layout.sp else 1)

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return stage_ranks(self.layout.schedule, self.layout.pp, self.layout.virtual_stages)

    @cached_property
    def compute_tables(self) -> tuple[Table, ...]:
        """The computing actions of each pipeline rank, in order."""
        layout = self.layout
        return compute_tables(layout.schedule, layout.pp, layout.virtual_stages, self.microbatches)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The computing actions, sends and receives of each pipeline rank, in order."""
        layout = self.layout
        return _tables(layout.schedule, layout.pp, layout.virtual_stages, self.microbatches)

    @cached_property
    def shardings(self) -> Mapping[str, Sharding]:
        """The sharding of each parameter on the mesh, by name, in the model's order."""
        return _shardings(self.model, self.layout.model_copy(update=_WHOLE_ON_A_RANK))

    def update_rule(self, name: str) -> UpdateRule:
        """Return the rule by which the optimizer updates a parameter, with its states."""
        return rule_of(self.optimizer, self.shardings[name].part)

    def held(self, pp_rank: int) -> tuple[Stage, ...]:
        """Return the stages that a pipeline rank holds."""
        return tuple(stage for stage in self.stages if self.stage_ranks[stage.index] == pp_rank)

    def parameters(self, stage: Stage) -> tuple[str, ...]:
        """Return the names of the parameters that a stage holds, in the model's order."""
        tied, names = self.model.tie_embeddings, names_by_layer(self.model)
        ends = [name for name in names[None] if stage.holds(self.shardings[name].part, tied)]
        is_before = [name for name in ends if name.startswith("embed.")]
        in_layers = (name for layer in stage.layers for name in names[layer])
        return (*is_before, *in_layers, *(name for name in ends if name not in is_before))

    def of_layer(self, layer: int) -> dict[str, Sharding]:
        """Return the shardings of a layer's parameters, by their names within it."""
        prefix = f"layers.{layer}."
        names = names_by_layer(self.model)[layer]
        return {name.removeprefix(prefix): self.shardings[name] for name in names}


class _Shardings(Mapping[str, Sharding]):
    """The sharding of each parameter, computed on first access: a plan needs only one layer of each
    kind."""

    def __init__(self, model: ModelSpec, layout: Layout) -> None:
        self._layout = layout
        self._parts = {part.name: part for part in parts(model)}
        self._made: dict[str, Sharding] = {}

    def __getitem__(self, name: str) -> Sharding:
        if name not in self._made:
            self._made[name] = shard(self._parts[name], self._layout)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts


@lru_cache(maxsize=64)
def _shardings(model: ModelSpec, layout: Layout) -> Mapping[str, Sharding]:
    """Return the sharding of each parameter; cached across layouts that shard alike."""
    return _Shardings(model, layout)


@lru_cache(maxsize=KEPT_TABLES)
def _tables(schedule: str, pp: int, virtual_stages: int, microbatches: int) -> tuple[Table, ...]:
    """Return the action tables with transfers; cached across layouts with the same pipeline."""
    return with_transfers(
        compute_tables(schedule, pp, virtual_stages, microbatches),
        stage_ranks(schedule, pp, virtual_stages),
    )


def lower(
    model: ModelSpec,
    train: TrainSpec,
    optimizer: OptimizerSpec,
    layout: Layout,
    target: Target = _ANY,
) -> Program:
    """Return the program of a legal layout, for a target that defaults to CPUs.

    Its model's vocabulary is padded to a size that tp divides.
    """
    model = padded(model, layout.tp)
    stages = split_stages(model, layout.stages, train.seq_len)
    return Program(model, train, optimizer, layout, stages, target)
