"""`predicted_profile`: the predicted step of a layout as a `StepProfile`, the schema of measured
steps too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from meshwright.cost.byte_count import PredictedMoment
from meshwright.cost.inputs import CostInputs
from meshwright.cost.kernels import Kernels
from meshwright.cost.memory import outside
from meshwright.cost.price import memory, price
from meshwright.cost.spans import Drawn, pipeline_spans
from meshwright.cost.step import host_seconds, merged_causes, pace_of
from meshwright.cost.systems import OURS
from meshwright.cost.timeline import timeline
from meshwright.layout import Layout
from meshwright.program.actions import Action
from meshwright.program.collectives import collectives
from meshwright.program.lower import Program, lower
from meshwright.program.profile import MemoryPoint, RankProfile, Span, StepProfile, Traffic
from meshwright.program.update import matrix_gathers

# Where a category of the predictions lies among those of the profile; others are activations.
_CATEGORIES: Final = {
    "weights": "parameters",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "gathered": "gathered",
    "communication buffers": "buffers",
    "context": "fixed",
    "communicators": "fixed",
    "allocator": "fixed",
}
# The cause of time that messages along an axis are; along others the price has no seconds.
_CAUSE_OF_AXIS: Final = {
    "tp": "tp",
    "cp": "cp",
    "ep": "ep",
    "shard": "data",
    "expert_shard": "data",
    "replicate": "data",
    "expert_replicate": "data",
    "data": "data",
}


def predicted_profile(
    setting: CostInputs, layout: Layout, *, ranks: Sequence[int] | None = None
) -> StepProfile:
    """Return the predicted step, by default with one rank for each place in the pipeline.

    The cluster must have the layout's number of devices (`planner.plan.on_cluster`). The spans of
    the slowest rank end with the step; those of other ranks may end earlier, because their
    reductions or updates are smaller. In the price, the optimizer waits for all ranks, because the
    gradient norm needs all gradients, and for the host's overhead at the end of a step. For other
    systems, only the peak of memory is predicted, and no messages.
    """
    kernels, prediction = setting.kernels(), price(setting, layout)
    pace = pace_of(setting, kernels, layout)
    slowest = prediction.time.ranks[prediction.time.slowest]
    # The copies of activations, which the host's share has too, are within the actions.
    host = host_seconds(kernels, pace.microbatches)
    after = slowest["data"] + slowest["optimizer"] + host
    drawn = pipeline_spans(setting, kernels, layout, pace, prediction.time.total - after)
    program = lower(setting.model, setting.train, setting.optimizer, layout, setting.target)
    mesh = layout.mesh
    chosen = [mesh.rank({"pp": place}) for place in range(layout.pp)] if ranks is None else ranks
    rows = []
    for rank in chosen:
        coordinates = mesh.coordinates(rank)
        drawn_rank = drawn[coordinates["pp"]]
        own_causes = prediction.time.ranks[coordinates["pp"]]
        end = _Ends(prediction.time.total, slowest, own_causes, host)
        spent = merged_causes(own_causes)
        rows.append(
            RankProfile(
                rank,
                coordinates,
                tuple(stage.index for stage in program.held(coordinates["pp"])),
                (*drawn_rank.spans, *(end.spans(drawn_rank.end) if drawn_rank.spans else ())),
                tuple(_memory(setting, program, rank, drawn_rank, end)),
                tuple(_traffic(setting, kernels, program, rank, spent)),
                spent,
            )
        )
    return StepProfile(
        "predicted",
        layout.model_dump(mode="json"),
        layout.label,
        setting.cluster.device.name,
        tuple(rows),
        step_time_s=prediction.time.total,
        tokens_per_s=prediction.tokens_per_s,
        mfu=prediction.mfu,
        memory_limit=setting.cluster.device.memory,
    )


class _Ends:
    """The times after the pipeline: gradient reduction, update, and the host's overhead."""

    def __init__(
        self,
        total: float,
        slowest: Mapping[str, float],
        rank_seconds: Mapping[str, float],
        host: float,
    ) -> None:
        self.total = total
        self.host = total - host
        self.update = self.host - slowest["optimizer"]
        self.reduce, self.update_seconds = rank_seconds["data"], rank_seconds["optimizer"]

    def spans(self, end: float) -> Iterator[Span]:
        """Yield the spans after the pipeline of a rank whose last action ends at `end` seconds."""
        if self.reduce > 0:
            yield Span("messages", "reduce", end, end + self.reduce, axis="data")
        if self.update_seconds > 0:
            yield Span("host", "update", self.update, self.update + self.update_seconds)
        if self.total > self.host:
            yield Span("host", "host", self.host, self.total)


def _memory(
    setting: CostInputs, program: Program, rank: int, drawn: Drawn, ends: _Ends
) -> Iterator[MemoryPoint]:
    """Yield a rank's memory: at the start, at the highest moment of each action, and at its end."""
    layout = program.layout
    if setting.system.name != OURS:
        terms = memory(setting, layout, layout.mesh.coordinates(rank)["pp"]).by_category()
        yield MemoryPoint("peak", None, _by_category(terms))
        return
    walk = timeline(program, rank)
    device = setting.cluster.device
    terms_outside = outside(
        device, layout, setting.system, setting.calibration, float(walk.peak.total)
    )
    fixed = round(sum(term.bytes for term in terms_outside))
    # A receive is posted within the action that comes next in the table.
    name = ""
    named: list[tuple[str, PredictedMoment]] = []
    for moment in reversed(walk.moments):
        is_transfer = moment.action.partition("_")[0] in ("SEND", "RECV")
        name = name if is_transfer else moment.action
        named.append((name, moment))
    for name, group in groupby(reversed(named), key=lambda pair: pair[0]):
        moments = [moment for _, moment in group]
        start, end = _when(name, drawn, ends)
        highest = max(range(len(moments)), key=lambda index: moments[index].total)
        for index in sorted({highest, len(moments) - 1}):
            share = (index + 1) / len(moments)
            time = None if start is None or end is None else start + share * (end - start)
            sizes = _by_category(moments[index].held)
            yield MemoryPoint(name, time, {**sizes, "fixed": fixed} if fixed else sizes)


def _when(name: str, drawn: Drawn, ends: _Ends) -> tuple[float | None, float | None]:
    """Return the start and end in seconds of an action, given as "KIND STAGE MICROBATCH", or of
    "start" or "update"."""
    if not drawn.actions:
        return None, None
    if name == "start":
        return 0.0, 0.0
    if name == "update":
        return ends.update, ends.update + ends.update_seconds
    kind, stage, microbatch = name.split()
    return drawn.actions[Action(kind, int(stage), int(microbatch))]  # type: ignore[arg-type]


def _by_category(sizes: Mapping[str, float]) -> dict[str, int]:
    sums: dict[str, float] = {}
    for name, size in sizes.items():
        key = _CATEGORIES.get(name, "activations")
        sums[key] = sums.get(key, 0.0) + size
    return {name: round(size) for name, size in sums.items() if size}


def _traffic(
    setting: CostInputs, kernels: Kernels, program: Program, rank: int, spent: dict[str, float]
) -> Iterator[Traffic]:
    """Yield a rank's messages with their waits.

    The wait for a cause is divided among its messages in proportion to their time on the links.
    """
    if setting.system.name != OURS:
        return
    layout = program.layout
    counts: dict[tuple[str, str, int], int] = {}
    of_update = matrix_gathers(program, layout.mesh.coordinates(rank))
    for message in (*collectives(program, rank), *of_update):
        key = message.kind, message.axis, message.bytes
        counts[key] = counts.get(key, 0) + message.count
    groups = {
        "tp": (layout.tp, 1),
        "cp": (layout.cp, layout.tp),
        "ep": (layout.ep, layout.expert_tp),
        "expert_shard": (layout.expert_shard_ranks, layout.expert_tp * layout.ep),
        "expert_replicate": (
            layout.expert_replica_ranks,
            layout.expert_tp * layout.ep * layout.expert_shard_ranks,
        ),
        "shard": (layout.shard_ranks, layout.tp),
        "replicate": (layout.replica_ranks, layout.tp * layout.shard_ranks),
        "data": (layout.dp * layout.cp, layout.tp),
    }
    on_links = {
        (kind, axis, size): times * kernels.network.seconds(kind, size, *groups[axis], axis)
        for (kind, axis, size), times in counts.items()
        if axis in groups
    }
    sums: dict[str, float] = {}
    for (_, axis, _), seconds in on_links.items():
        cause = _CAUSE_OF_AXIS[axis]
        sums[cause] = sums.get(cause, 0.0) + seconds
    for (kind, axis, size), times in counts.items():
        waited = None
        if axis in groups and sums[_CAUSE_OF_AXIS[axis]]:
            cause = _CAUSE_OF_AXIS[axis]
            waited = spent.get(cause, 0.0) * on_links[kind, axis, size] / sums[cause]
        yield Traffic(kind, axis, size, times, waited)
