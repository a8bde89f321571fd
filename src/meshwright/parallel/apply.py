"""`Parallel`: a rank's part of the model, ready for training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.groups import Groups, Link
from meshwright.data.sampler import IGNORE, PADDING
from meshwright.kernels.varlen import takes_bounds
from meshwright.models import Transformer
from meshwright.models.context import Unpadded, causal_mask
from meshwright.models.rope import lengths_of
from meshwright.parallel.batch import Batch
from meshwright.parallel.data_parallel.float8_gather import Float8Gathers
from meshwright.parallel.data_parallel.gradients import GatheredParameter
from meshwright.parallel.data_parallel.sharded import DTYPES, finish_replicas, head_unit, reshard
from meshwright.parallel.expert_parallel.routing import Routers, prepare_routers, sum_counts
from meshwright.parallel.loss import loss_sum
from meshwright.parallel.pipeline import Observe, Pipeline, Scale
from meshwright.parallel.tensor_parallel.deferred import Deferral
from meshwright.parallel.tensor_parallel.tp_regions import TPRegion
from meshwright.program.attention import ScoreBounds
from meshwright.program.gradient_sums import GradientSum, gradient_sums
from meshwright.program.lower import Program
from meshwright.program.schedule import Action, Table, with_transfers
from meshwright.spec.model import PLAIN_LAYER


@dataclass
class Parallel:
    """A rank's pipeline stages with every parallelism applied, and what runs a step with them.

    `modules` are the stages by number, `held` the parameters that this rank has shards of.
    `positions` int64 `[seq / cp]` are the positions of a sequence in this rank's attention,
    `places` those in its residual stream (fewer with sequence parallelism); None: all. The loss
    computes the logits of `loss_rows` tokens at a time; `fuses_loss` is `fuses` of `loss_sum`.
    """

    program: Program
    groups: Groups
    device: torch.device
    modules: dict[int, nn.Module]
    held: list[GatheredParameter]
    positions: Tensor | None
    places: Tensor | None
    deferral: Deferral
    loss_rows: int
    fuses_loss: bool
    observe: Observe | None = None
    routers: Routers = field(default_factory=dict)
    float8: Float8Gathers | None = None
    _tables: dict[int, Table] = field(default_factory=dict)

    @property
    def trained(self) -> list[GatheredParameter]:
        """The parameters that are trained: with adapters, only those of the adapters."""
        return [param for param in self.held if param.sharding.part.trained]

    @cached_property
    def sums(self) -> tuple[GradientSum, ...]:
        """The sums over tp and tied copies that complete this rank's gradients."""
        return tuple(gradient_sums(self.program, self.program.held(self.groups.at["pp"])))

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return self.program.stage_ranks

    @property
    def pp(self) -> Link:
        """The link along the pipeline."""
        return self.groups.pp

    @property
    def zero(self) -> int:
        """The ZeRO stage."""
        return self.program.layout.zero

    @property
    def recorder(self) -> FlightRecorder:
        """The flight recorder of this rank."""
        return self.groups.recorder

    @property
    def counts_loss(self) -> bool:
        """Whether this rank contributes its loss to the sum: tp rank 0 of the last stage does."""
        last = self.stage_ranks[-1] == self.groups.at["pp"]
        return last and self.groups.tp.rank == 0

    def stream(self, batch: Batch) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of the hidden states that a stage outputs for a microbatch."""
        program = self.program
        shape = (len(batch.inputs), program.stream, program.model.dim)
        return shape, DTYPES[program.train.precision]

    def forward(self, stage: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Return the hidden states after a stage, or the summed loss if it is the last stage.

        `hidden` are the previous stage's hidden states, None for the first stage.
        """
        ends = {}
        if stage == len(self.stage_ranks) - 1:
            ends["project"] = partial(
                loss_sum,
                targets=batch.targets,
                ignore=IGNORE,
                tp_region=TPRegion(self.groups.tp, self.program.layout.sp),
                at_once=self.loss_rows,
                fuses=self.fuses_loss,
                cap=self.program.model.logits_softcap,
                vocab=self.program.model.vocab_size,
                unit=head_unit(self.modules[stage]),
            )
        out: Tensor = self.modules[stage](
            batch.inputs if hidden is None else hidden,
            segments=self._documents(batch),
            positions=self.positions,
            keys=batch.keys,
            places=self.places,
            unpadded=self._unpadded(batch),
            lengths=self._lengths(batch),
            documents=batch.segments if self.program.model.recurs else None,
            **ends,
        )
        return out

    def _documents(self, batch: Batch) -> Tensor | None:
        """Return the documents as attention needs them: segments, varlen bounds or a mask.

        None: the batch is not packed.
        """
        layout, train, model = self.program.layout, self.program.train, self.program.model
        if batch.segments is None or (layout.cp > 1 and layout.cp_kind == "ring"):
            return batch.segments
        dtype, scores = DTYPES[train.precision], ScoreBounds.of(model, PLAIN_LAYER)
        if takes_bounds(self.device, dtype, model.core_dim, scores):
            assert batch.bounds is not None
            return batch.bounds
        return causal_mask(batch.segments, batch.segments, None)

    def _unpadded(self, batch: Batch) -> Unpadded | None:
        """Return which tokens this rank's routers count; None: all."""
        if batch.segments is None or not self.routers:
            return None
        is_data = batch.segments != PADDING
        seen = self.places if self.program.layout.folds > 1 else self.positions
        return Unpadded(is_data if seen is None else is_data[:, seen], is_data.sum(1))

    def _lengths(self, batch: Batch) -> Tensor | None:
        """Return the document length of each of this rank's tokens; None where longrope
        ignores it.
        """
        scaling, train = self.program.model.rope_scaling, self.program.train
        if batch.segments is None or scaling is None or scaling.kind != "longrope":
            return None
        if train.seq_len <= scaling.original_context:  # no document is long
            return None
        lengths = lengths_of(batch.segments)
        return lengths if self.positions is None else lengths[:, self.positions]

    def backward(self, batch: Batch, loss_scale: float = 1.0) -> Tensor:
        """Accumulate the gradients of the mean loss over the global batch.

        Each microbatch contributes the sum of its token losses divided by the global number of
        targets, so the result does not depend on how the batch is divided. Returns this rank's
        share of the loss, in nats; the shares of all ranks add up to the loss.
        """
        count = self.count_targets(batch)
        self._rescale()
        sequences = len(batch.inputs) * self.program.layout.dp
        scale = loss_scale / sequences
        prepare_routers(self.routers, self.program, self.groups, scale, self.device)
        parts = batch.at(self.positions).split(self.program.layout.microbatch)
        table = self.program.tables[self.groups.at["pp"]]
        loss = Pipeline(self, table, parts, Scale(1.0 / count, loss_scale)).run(self.observe)
        for module in self.modules.values():
            finish_replicas(module)
        sum_counts(self.routers, self.program, self.groups)
        return loss / count if self.counts_loss else torch.zeros_like(loss)

    def _rescale(self) -> None:
        """Recompute the scales of weights that are gathered in float8, since updates change
        them.
        """
        if self.float8 is not None:
            self.float8.rescale()

    def count_targets(self, batch: Batch) -> Tensor:
        """Return the number of targets in the global batch, on the device, without waiting."""
        # Every cp rank has the whole rows: each counts its own positions of them.
        count = (batch.at(self.positions).targets != IGNORE).sum()
        if self.groups.data.size > 1:
            dist.all_reduce(count, group=self.groups.data.group)
        return count.clamp(min=1)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, float]:
        """Return this rank's part of the summed loss over some batches, and of the number of
        targets.

        Ranks whose loss is not counted return zeros.
        """
        total = count = 0.0
        self._rescale()
        for batch in batches:
            parts = batch.at(self.positions).split(self.program.layout.microbatch)
            loss = Pipeline(self, self._forward_table(len(parts)), parts, None).run()
            if self.counts_loss:
                total += loss.item()
                count += float(sum((part.targets != IGNORE).sum() for part in parts))
        for module in self.modules.values():
            reshard(module)
        return total, count

    def _forward_table(self, microbatches: int) -> Table:
        """Return this rank's actions for a forward-only pass: each stage runs all microbatches."""
        if microbatches not in self._tables:
            everyone = tuple(
                tuple(
                    Action("F", stage.index, index)
                    for stage in self.program.held(rank)
                    for index in range(microbatches)
                )
                for rank in range(self.program.layout.pp)
            )
            tables = with_transfers(everyone, self.stage_ranks)
            self._tables[microbatches] = tables[self.groups.at["pp"]]
        return self._tables[microbatches]


def set_training(parallel: Parallel, mode: bool) -> None:
    """Set the train mode of all stages, which switches dropout on or off."""
    for module in parallel.modules.values():
        assert isinstance(module, Transformer)
        module.train(mode)
