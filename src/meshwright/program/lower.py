"""`lower`: from specs and a layout to the one `Program` that everything else reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from meshwright.layout import Layout
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
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import parts
from meshwright.spec.training import TrainSpec

# CPUs, torch's own kernels.
_ANY: Final = Target()


@dataclass(frozen=True)
class Program:
    """What every rank holds, computes and sends in one optimizer step.

    Cheap to make: what takes time (tables of many microbatches) is worked out when first asked for.
    """

    model: ModelSpec
    train: TrainSpec
    layout: Layout
    stages: tuple[Stage, ...]
    target: Target = _ANY

    @property
    def microbatches(self) -> int:
        """Microbatches of a data-parallel rank in one step."""
        return self.layout.microbatches(self.train.batch)

    @property
    def sequence(self) -> int:
        """Tokens of a sequence that a rank attends with: its share over cp."""
        return self.train.seq_len // self.layout.cp

    @property
    def stream(self) -> int:
        """Tokens of a sequence in the residual stream: `sequence`, cut over tp with sp."""
        return self.sequence // (self.layout.tp if self.layout.sp else 1)

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return stage_ranks(self.layout.schedule, self.layout.pp, self.layout.virtual_stages)

    @cached_property
    def compute_tables(self) -> tuple[Table, ...]:
        """What each pipeline rank computes, in order."""
        layout = self.layout
        return compute_tables(layout.schedule, layout.pp, layout.virtual_stages, self.microbatches)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """What each pipeline rank computes, sends and receives, in order."""
        layout = self.layout
        return _tables(layout.schedule, layout.pp, layout.virtual_stages, self.microbatches)

    @cached_property
    def shardings(self) -> dict[str, Sharding]:
        """How each parameter lies on the mesh, by name, in the model's order."""
        return {part.name: shard(part, self.layout) for part in parts(self.model)}

    def held(self, pp_rank: int) -> tuple[Stage, ...]:
        """Return the stages of a pipeline rank."""
        return tuple(stage for stage in self.stages if self.stage_ranks[stage.index] == pp_rank)

    def parameters(self, stage: Stage) -> tuple[str, ...]:
        """Return the names of the parameters that a stage holds."""
        tied, layers = self.model.tie_embeddings, stage.layers
        return tuple(
            name
            for name, layer in self._layers.items()
            if layer in layers or (layer is None and stage.holds(self.shardings[name].part, tied))
        )

    def of_layer(self, layer: int) -> dict[str, Sharding]:
        """Return how the parameters of a layer lie on the mesh, by their names within it."""
        prefix = f"layers.{layer}."
        return {
            name.removeprefix(prefix): self.shardings[name]
            for name, at in self._layers.items()
            if at == layer
        }

    @cached_property
    def _layers(self) -> dict[str, int | None]:
        """The layer of each parameter, None where it is in none."""
        return {
            name: int(name.split(".", 2)[1]) if name.startswith("layers.") else None
            for name in self.shardings
        }


@lru_cache(maxsize=KEPT_TABLES)
def _tables(schedule: str, pp: int, virtual_stages: int, microbatches: int) -> tuple[Table, ...]:
    """Return the tables with transfers; many layouts of a plan have the same ones."""
    return with_transfers(
        compute_tables(schedule, pp, virtual_stages, microbatches),
        stage_ranks(schedule, pp, virtual_stages),
    )


def lower(model: ModelSpec, train: TrainSpec, layout: Layout, target: Target = _ANY) -> Program:
    """Return the program of a layout that the rules allow, for a target: by default CPUs."""
    stages = split_stages(model, layout.stages, train.seq_len)
    return Program(model, train, layout, stages, target)
