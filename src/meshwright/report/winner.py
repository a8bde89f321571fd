"""Which of several runs was the fastest, by how much, and why."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from meshwright.report.causes import CAUSE_NAMES, mean_causes
from meshwright.report.curves import series
from meshwright.report.figure import seconds
from meshwright.report.record import RunRecord
from meshwright.units import format_count


def winner(runs: Sequence[RunRecord], names: Sequence[str]) -> list[str]:
    """Return sentences that name the run with the most tokens per second; empty without steps.

    The lead is over the next one, in medians of logged steps. The reason is the cause on which the
    next one's recorded step spends the most additional time.
    """
    speeds = [statistics.median(found) if (found := _speeds(run)) else 0.0 for run in runs]
    order = sorted(range(len(runs)), key=speeds.__getitem__, reverse=True)
    if len(runs) < 2 or not speeds[order[1]]:
        return []
    first, second = order[0], order[1]
    lead = speeds[first] / speeds[second] - 1
    said = [
        f"{names[first]} is the fastest: {format_count(speeds[first])} tokens a second, {lead:.0%} "
        f"more than {names[second]}."
    ]
    one, other = runs[first].measured, runs[second].measured
    if one is None or other is None:
        return said
    causes, others = mean_causes(one), mean_causes(other)
    more = {key: others.get(key, 0.0) - causes.get(key, 0.0) for key in {*causes, *others}}
    most = max(more, key=more.__getitem__)
    if more[most] > 0:
        here, there = (seconds(found.get(most, 0.0)) for found in (causes, others))
        named = CAUSE_NAMES[most].lower()
        said.append(
            f"The largest difference of their recorded steps is {named}: {here} beside {there}."
        )
    return said


def _speeds(run: RunRecord) -> list[float]:
    return series(run.steps, "tokens_per_s")[1]
