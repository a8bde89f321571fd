"""`detail`: the details of a layout on a page: price, why it is not the best, memory, timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from meshwright.cost.price import OUTSIDE, Prediction, memories, price
from meshwright.cost.setting import Setting
from meshwright.cost.spans import pipeline_spans
from meshwright.cost.step import pace_of
from meshwright.errors import MeshwrightError
from meshwright.layout import Layout
from meshwright.planner.advice import lost_by, warnings
from meshwright.planner.pins import given
from meshwright.planner.plan import Plan, check_legal, on_cluster, prediction_json
from meshwright.program.profile import Span
from meshwright.report.peaks import PROCESS, TENSORS
from meshwright.units import format_bytes

# So many actions are drawn of a step.
_MOST_SPANS: Final = 1500


def detail(made: Plan, label: str) -> dict[str, Any]:
    """Return a layout of a plan in detail, or why there is no such layout."""
    try:
        layout = Layout.parse(label)
        check_legal(made.setting, layout)
        setting = on_cluster(made.setting, layout)
        found = price(setting, layout)
        return {
            **prediction_json(found),
            "peak_name": _peak_name(found),
            "why_not": _why_not(made, found),
            "warnings": warnings(found, setting),
            "ranks": [
                {"rank": held.rank, "bytes": held.by_category(), "total": held.total}
                for held in memories(setting, layout)
            ],
            "timeline": _timeline(setting, found),
        }
    except MeshwrightError as error:
        return {"label": label[:200], "why_not": str(error), "refused": True}


def _peak_name(found: Prediction) -> str:
    """Return which peak is predicted: without what is outside a program, it is that of tensors."""
    held = found.memory.by_category()
    return PROCESS if any(held.get(name) for name in OUTSIDE) else TENSORS


def _why_not(made: Plan, found: Prediction) -> str:
    """Return why a layout is not the best one."""
    said = []
    if found.devices != made.setting.cluster.devices:
        said.append(f"it has {found.devices} ranks, not {made.setting.cluster.devices}")
    others = {
        key: value
        for key, value in given(made.config).items()
        if getattr(found.layout, key) != value
    }
    said += [f"{key} is fixed to {value}" for key, value in others.items()]
    held, share = found.memory, 1 - made.margin
    if held.total > held.limit * share:
        room = format_bytes(held.limit * share)
        said.append(f"it needs {format_bytes(held.total)}; {room} are to be filled")
    if made.best is not None and found.layout != made.best.layout:
        said.append(lost_by(found, made.best))
    return "; ".join(said) or "it is the best"


def _timeline(setting: Setting, found: Prediction) -> dict[str, Any]:
    """Return the actions of each pipeline rank: kind, start, end, stage, microbatch.

    Of a long step, those in the middle are left out: `fold` has its start and end in seconds.
    """
    layout, time = found.layout, found.time
    slowest = time.ranks[time.slowest]
    after = slowest["data"] + slowest["optimizer"] + slowest["host"]
    kernels = setting.kernels()
    pace = pace_of(setting, kernels, layout)
    drawn = pipeline_spans(setting, kernels, layout, pace, time.total - after)
    most = _MOST_SPANS // layout.pp
    ranks = [[s for s in one.spans if s.track == "compute"] for one in drawn]
    fold = _fold(ranks, most)
    shown = [[s for s in own if fold is None or not fold[0] <= s.start < fold[1]] for own in ranks]
    return {
        "total": time.total,
        "actions_end": time.total - after,
        "fold": fold,
        "left_out": sum(map(len, ranks)) - sum(map(len, shown)),
        "ranks": [
            [[s.name, _digits(s.start), _digits(s.end), s.stage, s.microbatch] for s in own]
            for own in shown
        ],
    }


def _fold(ranks: Sequence[Sequence[Span]], most: int) -> tuple[float, float] | None:
    """Return the middle of a step in which ranks have more actions than are drawn of each."""
    kept = most // 2
    long = [own for own in ranks if len(own) > 2 * kept]
    if not long:
        return None
    start, stop = max(own[kept - 1].end for own in long), min(own[-kept].start for own in long)
    return (start, stop) if start < stop else None


def _digits(seconds: float) -> float:
    """Return seconds in as many digits as a picture shows: a page has thousands of them."""
    return float(f"{seconds:.6g}")
