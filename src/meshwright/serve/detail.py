"""`detail`: the details of a layout on a page: price, why it is not the best, memory, timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import OUTSIDE, Prediction, memories, price
from meshwright.cost.spans import pipeline_spans
from meshwright.cost.step import pace_of
from meshwright.errors import MeshwrightError
from meshwright.layout import Layout
from meshwright.planner.advice import lost_by, warnings
from meshwright.planner.plan import Plan, check_legal, on_cluster, prediction_json
from meshwright.planner.space import given
from meshwright.program.profile import Span
from meshwright.report.peaks import PROCESS, TENSORS
from meshwright.units import format_bytes

# So many actions are drawn of a step.
_MOST_SPANS: Final = 1500


def detail(plan: Plan, label: str) -> dict[str, Any]:
    """Return a layout of a plan in detail, or why there is no such layout."""
    try:
        layout = Layout.parse(label)
        check_legal(plan.setting, layout)
        setting = on_cluster(plan.setting, layout)
        prediction = price(setting, layout)
        return {
            **prediction_json(prediction),
            "peak_name": _peak_name(prediction),
            "why_not": _why_not(plan, prediction),
            "warnings": warnings(prediction, setting),
            "ranks": [
                {
                    "rank": rank_memory.rank,
                    "bytes": rank_memory.by_category(),
                    "total": rank_memory.total,
                }
                for rank_memory in memories(setting, layout)
            ],
            "timeline": _timeline(setting, prediction),
        }
    except MeshwrightError as error:
        return {"label": label[:200], "why_not": str(error), "refused": True}


def _peak_name(prediction: Prediction) -> str:
    """Return the name of the predicted peak: the process's if it includes more than tensors."""
    categories = prediction.memory.by_category()
    return PROCESS if any(categories.get(name) for name in OUTSIDE) else TENSORS


def _why_not(plan: Plan, prediction: Prediction) -> str:
    """Return why a layout is not the best one."""
    reasons = []
    if prediction.devices != plan.setting.cluster.devices:
        reasons.append(f"it has {prediction.devices} ranks, not {plan.setting.cluster.devices}")
    differing = {
        key: value
        for key, value in given(plan.config).items()
        if getattr(prediction.layout, key) != value
    }
    reasons += [f"{key} is fixed to {value}" for key, value in differing.items()]
    memory, share = prediction.memory, 1 - plan.margin
    if memory.total > memory.limit * share:
        available = format_bytes(memory.limit * share)
        reasons.append(f"it needs {format_bytes(memory.total)}; {available} are to be filled")
    if plan.best is not None and prediction.layout != plan.best.layout:
        reasons.append(lost_by(prediction, plan.best))
    return "; ".join(reasons) or "it is the best"


def _timeline(setting: CostInputs, prediction: Prediction) -> dict[str, Any]:
    """Return the actions of each pipeline rank: kind, start, end, stage, microbatch.

    Of a long step, those in the middle are left out: `fold` has its start and end in seconds.
    """
    layout, time = prediction.layout, prediction.time
    slowest = time.ranks[time.slowest]
    after = slowest["data"] + slowest["optimizer"] + slowest["host"]
    kernels = setting.kernels()
    pace = pace_of(setting, kernels, layout)
    drawn = pipeline_spans(setting, kernels, layout, pace, time.total - after)
    limit = _MOST_SPANS // layout.pp
    ranks = [[s for s in rank_profile.spans if s.track == "compute"] for rank_profile in drawn]
    fold = _fold(ranks, limit)
    shown = [
        [s for s in rank_spans if fold is None or not fold[0] <= s.start < fold[1]]
        for rank_spans in ranks
    ]
    return {
        "total": time.total,
        "actions_end": time.total - after,
        "fold": fold,
        "left_out": sum(map(len, ranks)) - sum(map(len, shown)),
        "ranks": [
            [[s.name, _digits(s.start), _digits(s.end), s.stage, s.microbatch] for s in rank_spans]
            for rank_spans in shown
        ],
    }


def _fold(ranks: Sequence[Sequence[Span]], limit: int) -> tuple[float, float] | None:
    """Return the middle of a step in which ranks have more actions than are drawn of each."""
    end_actions = limit // 2
    long = [rank_spans for rank_spans in ranks if len(rank_spans) > 2 * end_actions]
    if not long:
        return None
    start, stop = (
        max(rank_spans[end_actions - 1].end for rank_spans in long),
        min(rank_spans[-end_actions].start for rank_spans in long),
    )
    return (start, stop) if start < stop else None


def _digits(seconds: float) -> float:
    """Return seconds in as many digits as a picture shows: a page has thousands of them."""
    return float(f"{seconds:.6g}")
