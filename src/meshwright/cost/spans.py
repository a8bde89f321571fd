"""`pipeline_spans`: the priced actions and waits of each pipeline rank over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from meshwright.cost.data_messages import reduction
from meshwright.cost.inputs import CostInputs, stages_of, work_of
from meshwright.cost.kernels import Kernels
from meshwright.cost.pipeline import action_times
from meshwright.cost.step import ActionTimes, Pass, costs_of, has_table
from meshwright.layout import Layout
from meshwright.program.actions import Action, receives, sends
from meshwright.program.profile import Span
from meshwright.program.schedule import stage_ranks

# Half of a backward is for the inputs, half for the weights, as the events have it.
_HALF: Final = 0.5


class Drawn(NamedTuple):
    """The spans of a pipeline rank, and the start and end in seconds of each of its computing
    actions."""

    spans: tuple[Span, ...]
    actions: dict[Action, tuple[float, float]]

    @property
    def end(self) -> float:
        """The second at which the rank's last action is done and its result sent; 0 without
        spans."""
        return max((span.end for span in self.spans), default=0.0)


def pipeline_spans(
    setting: CostInputs, kernels: Kernels, layout: Layout, pace: ActionTimes, seconds: float
) -> tuple[Drawn, ...]:
    """Return the spans of each pipeline rank, scaled so that the pipeline takes `seconds`, its
    price.

    The price comes from the same simulated events. What it has beyond them stretches all spans
    alike: the idle time that was measured for the trainer that is priced, and the extrapolation to
    hundreds of microbatches (`cost.pipeline.by_events`). Messages within an action are drawn
    together at its end. A receive is the wait for it; a send is its exposed part. Empty if the
    action tables do not allow the schedule with these microbatches.
    """
    if not has_table(layout, pace.microbatches):
        return tuple(Drawn((), {}) for _ in range(layout.pp))
    costs = costs_of(setting, kernels, layout, pace)
    times = action_times(layout, pace.microbatches, costs)
    scale = seconds / max(end for _, end in times.values())
    ranks = stage_ranks(layout.schedule, layout.pp, layout.virtual_stages)
    actions: list[dict[Action, tuple[float, float]]] = [{} for _ in range(layout.pp)]
    for action, (start, end) in times.items():
        actions[ranks[action.stage]][action] = (start * scale, end * scale)
    draw = _Pen(setting, layout, pace, ranks, scale, costs.transfer * costs.exposed * scale)
    return tuple(Drawn(tuple(draw.spans(rank_actions)), rank_actions) for rank_actions in actions)


class _Pen:
    """Makes spans from actions and their times."""

    def __init__(
        self,
        setting: CostInputs,
        layout: Layout,
        pace: ActionTimes,
        ranks: tuple[int, ...],
        scale: float,
        sending: float,
    ) -> None:
        stages = stages_of(
            setting.model, layout.stages, setting.train.seq_len, setting.system.even_stages
        )
        self.passes = [pace.passes(stage) for stage in stages]
        self.ranks, self.scale, self.sending = ranks, scale, sending
        self.bytes = work_of(setting, layout).sizes.stream_bytes
        self.kinds = {
            "tp": "all_gather" if layout.sp else "all_reduce",
            "cp": "all_to_all" if layout.cp_kind == "ulysses" else "recv",
            "ep": "all_to_all",
            "shard": "all_gather" if layout.zero == 3 else reduction(setting, layout),
        }

    def spans(self, actions: dict[Action, tuple[float, float]]) -> Iterator[Span]:
        """Yield the spans of a rank in the order of its actions."""
        free = 0.0
        for action, (start, end) in actions.items():
            place = action.stage, action.microbatch
            awaited = receives(action, self.ranks)
            if awaited is not None and start > free:
                yield Span("messages", awaited[0].kind, free, start, *place, "pp", self.bytes)
            yield Span("compute", action.kind, start, end, *place)
            yield from self._within(action, end)
            free = end
            sent = sends(action, self.ranks)
            if sent is not None and self.sending:
                free = end + self.sending
                yield Span("messages", sent[0].kind, end, free, *place, "pp", self.bytes)

    def _within(self, action: Action, end: float) -> Iterator[Span]:
        """Yield spans of what an action waits for along the other axes, drawn together at its
        end."""
        pass_times: Pass = self.passes[action.stage][action.kind != "F"]
        share = self.scale * (_HALF if action.kind in ("I", "W") else 1.0)
        waits = {
            "tp": pass_times.tp,
            "cp": pass_times.cp,
            "ep": pass_times.ep,
            "shard": pass_times.gathers,
        }
        start = end - share * (sum(waits.values()) + pass_times.copies)
        if pass_times.copies > 0:
            stop = start + share * pass_times.copies
            yield Span("host", "copy", start, stop, action.stage, action.microbatch)
            start = stop
        for axis, seconds in waits.items():
            if seconds > 0:
                stop = start + share * seconds
                kind = self.kinds[axis]
                yield Span("messages", kind, start, stop, action.stage, action.microbatch, axis)
                start = stop
