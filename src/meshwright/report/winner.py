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
    speeds = [statistics.median(rates) if (rates := _speeds(run)) else 0.0 for run in runs]
    order = sorted(range(len(runs)), key=speeds.__getitem__, reverse=True)
    if len(runs) < 2 or not speeds[order[1]]:
        return []
    first, second = order[0], order[1]
    lead = speeds[first] / speeds[second] - 1
    sentences = [
        f"{names[first]} is the fastest: {format_count(speeds[first])} tokens a second, {lead:.0%} "
        f"more than {names[second]}."
    ]
    fastest, runner_up = runs[first].measured, runs[second].measured
    if fastest is None or runner_up is None:
        return sentences
    fastest_causes, runner_up_causes = mean_causes(fastest), mean_causes(runner_up)
    excess = {
        key: runner_up_causes.get(key, 0.0) - fastest_causes.get(key, 0.0)
        for key in {*fastest_causes, *runner_up_causes}
    }
    largest = max(excess, key=excess.__getitem__)
    if excess[largest] > 0:
        fastest_time, runner_up_time = (
            seconds(run_causes.get(largest, 0.0))
            for run_causes in (fastest_causes, runner_up_causes)
        )
        named = CAUSE_NAMES[largest].lower()
        sentences.append(
            f"The largest difference of their recorded steps is {named}: {fastest_time} beside "
            f"{runner_up_time}."
        )
    return sentences


def _speeds(run: RunRecord) -> list[float]:
    return series(run.steps, "tokens_per_s")[1]
