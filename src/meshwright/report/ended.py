"""The banner of a run that did not go well: the cause, what to do, the command."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from meshwright.program.events import ending
from meshwright.report.curves import series
from meshwright.report.figure import finite
from meshwright.report.record import RunRecord
from meshwright.units import format_seconds

# Steps that are looked at together, and by how much a loss may be above the lowest such median.
_WINDOW: Final = 10
_DIVERGED: Final = 1.3
# A run that has written nothing for so many steps, and seconds, was probably killed.
_SILENT_STEPS, _SILENT_S = 20.0, 120.0

# What a failure of each kind is called, and what helps.
_KINDS: Final = {
    "memory": (
        "The run ran out of memory",
        "Plan a layout that fits: more shards, recomputation, a smaller layout.microbatch.",
    ),
    "killed": (
        "A rank was killed",
        "If the system did it because memory ran out, plan a layout that fits; else resume.",
    ),
    "hang": (
        "The run hung",
        "The cause names the ranks that waited. `doctor` shows where each of them was.",
    ),
    "diverged": (
        "The run diverged",
        "Resume with a lower optimizer.lr, train.clip_norm or a longer warm-up.",
    ),
    "other": (
        "The run failed",
        "Mend the cause, then resume: training continues after the last saved step.",
    ),
}


class Banner(NamedTuple):
    """What happened, why, what to do, and the commands for it."""

    title: str
    cause: str
    todo: str
    commands: tuple[str, ...]


def banner(run: RunRecord, unix_time: float | None = None) -> Banner | None:
    """Return the banner of a run; None if nothing went wrong, or if it is still running.

    `unix_time` is in seconds since 1970, by default the clock's.
    """
    folder = shlex.quote(str(run.path.resolve()))
    resume, doctor = f"meshwright train --resume {folder}", f"meshwright doctor {folder}"
    end = ending(run.events)
    if end is not None and end["event"] == "failed":
        kind = str(end.get("kind"))  # earlier versions wrote none
        title, todo = _KINDS.get(kind, _KINDS["other"])
        commands = [doctor, resume]
        if kind in ("memory", "killed"):
            config = shlex.quote(str(run.path.resolve() / "config.toml"))
            commands = [f"meshwright plan {config} --top 5", resume]
        return Banner(title, f"{end['cause']}.", todo, tuple(commands))
    diverged = _diverged(run.steps)
    if diverged is not None:
        todo = "Resume from a step before that with a lower optimizer.lr or another data.seed."
        return Banner("The run diverged", diverged, todo, (resume,))
    silent = _silent(run, time.time() if unix_time is None else unix_time)
    if end is None and silent is not None:
        cause = f"No end is recorded, and nothing was written for {format_seconds(silent)}."
        todo = "If its processes are gone, resume it: training continues after the last saved step."
        return Banner("The run ended without a word", cause, todo, (doctor, resume))
    return None


def _diverged(steps: Sequence[Any]) -> str | None:
    """Return how the loss diverged, if it did: not finite, or far above its lowest median."""
    if not steps:
        return None
    last = steps[-1]
    if finite(last.get("loss")) is None:
        return f"The loss of step {last['step']} is {last.get('loss')}."
    xs, losses = series(steps, "loss")
    if len(losses) < 2 * _WINDOW:
        return None
    medians = [
        statistics.median(losses[start : start + _WINDOW])
        for start in range(len(losses) - _WINDOW + 1)
    ]
    lowest = min(medians)
    if medians[-1] <= _DIVERGED * lowest:
        return None
    since = xs[medians.index(lowest) + _WINDOW - 1]
    return f"The loss was {lowest:.3g} at step {since:.0f}, and is {medians[-1]:.3g} at the end."


def _silent(run: RunRecord, unix_time: float) -> float | None:
    """Return for how long a run has written nothing, if that is longer than its steps explain."""
    file = run.path / "events.jsonl"
    times = series(run.steps, "step_time_s")[1]
    if not file.is_file():
        return None
    silence = unix_time - file.stat().st_mtime
    pace = statistics.median(times) if times else 0.0
    return silence if silence > max(_SILENT_S, _SILENT_STEPS * pace) else None
