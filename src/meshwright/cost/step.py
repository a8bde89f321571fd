"""The time of a step by cause: compute, messages, pipeline bubble, optimizer, host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from meshwright.cost.data_messages import (
    Waits,
    data_messages,
    data_wait,
    unit_messages,
    unit_waits,
)
from meshwright.cost.elements import elements_of
from meshwright.cost.host import CopyWaits, copy_waits
from meshwright.cost.inputs import CostInputs, layers_of_ranks, stages_of, work_of
from meshwright.cost.kernels import Kernels, Seconds
from meshwright.cost.microbatch import MicrobatchTimes, parts_of
from meshwright.cost.optimizer import matrix_seconds, updates
from meshwright.cost.pipeline import Costs, by_events, closed_form
from meshwright.cost.sums import GradientSums, sums_of
from meshwright.cost.work import LayoutWork, RankLayers
from meshwright.layout import Layout
from meshwright.layout.schedules import microbatch_rule
from meshwright.program.optimizer import moved_bytes
from meshwright.program.profile import CAUSES
from meshwright.program.sizes import ELEMENT_BYTES
from meshwright.program.stages import Stage
from meshwright.spec.model import ModelSpec


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: the total, and for each place in the pipeline the seconds by cause.

    `slowest` is the place whose microbatches take longest. The causes of a rank add up to the
    total. `bubble` is the wait for other stages, `gathers` ZeRO's messages in each microbatch,
    `data` the data-parallel messages once per step.
    """

    total: float
    ranks: tuple[Mapping[str, float], ...]
    slowest: int = 0

    @property
    def causes(self) -> dict[str, float]:
        """Seconds by the causes of a step profile, as the mean over the pipeline ranks; they add up
        to the total."""
        merged = [merged_causes(seconds) for seconds in self.ranks]
        return {
            cause: sum(seconds[cause] for seconds in merged) / len(merged) for cause in merged[0]
        }

    @property
    def gathers(self) -> float:
        """Seconds of waiting for ZeRO's messages in microbatches, as the mean over the pipeline
        ranks."""
        return sum(seconds["gathers"] for seconds in self.ranks) / len(self.ranks)


def merged_causes(causes: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds by the causes of a step profile, in which "data" includes "gathers"."""
    merged = {**causes, "data": causes["data"] + causes["gathers"]}
    return {cause: merged[cause] for cause in CAUSES if cause in merged}


class Pass(NamedTuple):
    """Seconds of one microbatch's forward or backward in a stage, by cause."""

    compute: float
    recompute: float
    tp: float
    cp: float
    ep: float
    gathers: float
    copies: float

    @property
    def total(self) -> float:
        """The seconds of all causes."""
        return sum(self)


@dataclass(frozen=True)
class ActionTimes:
    """What determines the times of a step's actions: the seconds of a microbatch, and waits.

    `held` has the layers of each pipeline rank, `whole` the seconds of one microbatch in all of its
    stages, `transfer` those of a message between neighboring stages.
    """

    model: ModelSpec
    parts: MicrobatchTimes
    gathers: Waits
    copies: CopyWaits
    sums: GradientSums
    held: tuple[RankLayers, ...]
    whole: tuple[float, ...]
    transfer: float
    microbatches: int

    @property
    def slowest(self) -> int:
        """The pipeline rank whose microbatches take longest."""
        return max(range(len(self.whole)), key=self.whole.__getitem__)

    @property
    def head(self) -> float:
        """Seconds of the head and the loss in the last stage's backward."""
        return self.parts.last.backward

    def passes(self, stage: Stage) -> tuple[Pass, Pass]:
        """Return the seconds of a microbatch's forward and backward in a stage."""
        held_layers = RankLayers.of(self.model, (stage,))
        forward, backward = zip(
            self.gathers.passes(held_layers), self.copies.passes(held_layers), strict=True
        )
        seconds_of = partial(self.parts.of, held_layers)
        tp, cp, ep = (
            seconds_of(f"{axis}_backward") + seconds_of(f"{axis}_recompute")
            for axis in ("tp", "cp", "ep")
        )
        forth = seconds_of("tp_forward"), seconds_of("cp_forward"), seconds_of("ep_forward")
        return (
            Pass(seconds_of("forward"), 0.0, *forth, *forward),
            Pass(
                seconds_of("backward") + self.sums.of(held_layers),
                seconds_of("recompute"),
                tp,
                cp,
                ep,
                *backward,
            ),
        )


def pace_of(setting: CostInputs, kernels: Kernels, layout: Layout) -> ActionTimes:
    """Return what determines the times of the actions of a layout's step."""
    parts = parts_of(setting, kernels, layout)
    ranks = layers_of_ranks(setting, layout)
    gathers = unit_waits(kernels, unit_messages(setting, kernels, layout), parts)
    copies, stages = copy_waits(setting, kernels, layout, parts), layout.virtual_stages
    sums = sums_of(setting, kernels, layout)
    microbatch_seconds = tuple(
        parts.total(held_layers)
        + gathers.of(held_layers)
        + copies.of(held_layers, stages)
        + sums.of(held_layers)
        for held_layers in ranks
    )
    transfer = transfer_seconds(kernels, layout, work_of(setting, layout))
    count = layout.microbatches(setting.train.batch)
    return ActionTimes(
        setting.model, parts, gathers, copies, sums, ranks, microbatch_seconds, transfer, count
    )


def step_time(
    setting: CostInputs, kernels: Kernels, layout: Layout, *, events: bool = True
) -> StepTime:
    """Return the time of a step; without `events`, prices the pipeline in closed form.

    Reductions and updates of all ranks run at the same time. The step ends with those of the rank
    whose microbatches take longest; the rest of the time of other ranks is a bubble.
    """
    pace = pace_of(setting, kernels, layout)
    slowest, pipeline = pace.slowest, _pipeline(setting, kernels, layout, pace, events)
    by_layers = {
        held_layers: rank_causes(setting, kernels, layout, pace, held_layers)
        for held_layers in set(pace.held)
    }
    longest = by_layers[pace.held[slowest]]
    # If the rank never waits, the difference is rounding, of either sign.
    bubble = kernels.idle * max(pipeline - pace.microbatches * pace.whole[slowest], 0.0)
    total = sum(longest.values()) + bubble
    for held_layers, causes in by_layers.items():
        for cause in ("data", "optimizer"):
            causes[cause] = min(causes[cause], longest[cause])
        is_slowest = held_layers == pace.held[slowest]
        causes["bubble"] = bubble if is_slowest else max(total - sum(causes.values()), 0.0)
    return StepTime(total, tuple(by_layers[held_layers] for held_layers in pace.held), slowest)


def rank_causes(
    setting: CostInputs,
    kernels: Kernels,
    layout: Layout,
    pace: ActionTimes,
    held_layers: RankLayers,
) -> dict[str, float]:
    """Return the seconds of a step by cause on a rank with these layers, without the bubble."""
    parts, count = pace.parts, pace.microbatches
    per_step = {cause: count * parts.of(held_layers, cause) for cause in Seconds._fields}
    return {
        "compute": per_step["forward"] + per_step["backward"] + count * pace.sums.of(held_layers),
        "recompute": per_step["recompute"],
        "tp": per_step["tp_forward"] + per_step["tp_backward"] + per_step["tp_recompute"],
        "cp": per_step["cp_forward"] + per_step["cp_backward"] + per_step["cp_recompute"],
        "ep": per_step["ep_forward"] + per_step["ep_backward"] + per_step["ep_recompute"],
        "gathers": count * pace.gathers.of(held_layers),
        "data": data_wait(
            setting,
            kernels,
            data_messages(setting, kernels, layout, held_layers),
            parts.room(held_layers),
        ),
        "optimizer": optimizer_seconds(setting, kernels, layout, held_layers),
        "host": host_seconds(kernels, count)
        + count * pace.copies.of(held_layers, layout.virtual_stages),
    }


def host_seconds(kernels: Kernels, microbatches: int) -> float:
    """Return the host's overhead in seconds in a step of `microbatches` microbatches."""
    return kernels.fixed + microbatches * kernels.per_microbatch


def _pipeline(
    setting: CostInputs, kernels: Kernels, layout: Layout, pace: ActionTimes, events: bool
) -> float:
    if layout.pp == 1 or not events or not has_table(layout, pace.microbatches):
        return closed_form(
            layout.schedule,
            layout.pp,
            layout.virtual_stages,
            pace.microbatches,
            max(pace.whole),
            sum(pace.whole),
            pace.transfer,
            kernels.exposed_pp,
        )
    return by_events(layout, pace.microbatches, costs_of(setting, kernels, layout, pace))


def has_table(layout: Layout, microbatches: int) -> bool:
    """Return whether the schedule allows this number of microbatches, so that it has action
    tables."""
    rule = microbatch_rule(layout.schedule, layout.pp, layout.virtual_stages, microbatches)
    return rule is None


def costs_of(setting: CostInputs, kernels: Kernels, layout: Layout, pace: ActionTimes) -> Costs:
    """Return the seconds of each stage and of messages, for simulating the pipeline."""
    stages = stages_of(
        setting.model, layout.stages, setting.train.seq_len, setting.system.even_stages
    )
    forward, backward = zip(*(pace.passes(stage) for stage in stages), strict=True)
    return Costs(
        [stage.total for stage in forward],
        [stage.total for stage in backward],
        pace.transfer,
        kernels.exposed_pp,
        pace.head if setting.system.fuses_loss else 0.0,
    )


def transfer_seconds(kernels: Kernels, layout: Layout, layout_work: LayoutWork) -> float:
    """Return the seconds of one message between neighboring pipeline ranks; 0 without a
    pipeline."""
    if layout.pp == 1:
        return 0.0
    stride = layout.dp * layout.cp * layout.tp
    return kernels.network.seconds("send", layout_work.sizes.stream_bytes, 2, stride, "pp")


def optimizer_seconds(
    setting: CostInputs, kernels: Kernels, layout: Layout, held_layers: RankLayers
) -> float:
    """Return the seconds of a rank's update, bound by memory bandwidth, or with offload by the
    host.

    Adds the gathers and matmuls of optimizers that need whole matrices.
    """
    moved_by_update = sum(
        update.elements * moved_bytes(update.rule, setting.optimizer, setting.train)
        for update in updates(setting, layout, held_layers)
    )
    whole_matrices = matrix_seconds(setting, kernels, layout, held_layers)
    if not layout.states_on_host:
        return moved_by_update / kernels.optimizer_bandwidth + whole_matrices
    elements = elements_of(setting.model, layout, held_layers, which="trained").share(layout)
    host = setting.cluster.host.bandwidth
    weight = ELEMENT_BYTES[setting.train.weight_dtype]
    # Gradients go down, weights up.
    moved = elements * (ELEMENT_BYTES[setting.train.gradient_dtype] + weight)
    if layout.offload == "params":
        count = layout.microbatches(setting.train.batch)
        frozen = elements_of(setting.model, layout, held_layers).share(layout) - elements
        moved += (elements * weight + frozen * setting.element) * 2 * count  # up for each pass
    return moved / host + moved_by_update / kernels.host_bandwidth + whole_matrices
