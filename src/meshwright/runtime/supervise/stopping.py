"""Stop requests: the supervisor's reaction, and how to resume the run. No torch here."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any, Final

from meshwright.comm.flight_recorder_file import Reading, read_flight_recorder
from meshwright.comm.rendezvous import Rendezvous
from meshwright.errors import RankFailed, StoppedOnRequest
from meshwright.runtime.supervise.elastic import starter
from meshwright.runtime.supervise.restart import committed, last_step
from meshwright.runtime.supervise.signals import StopSignals
from meshwright.training.run_folder import Job

# In these a first step is under way, or has not begun.
_BEFORE: Final = ("start", "load", "data", "forward", "backward", "reduce")


class Stopping:
    """Reacts to requests to stop the local ranks of a job; `say` shows a line at once.

    The first request makes the ranks finish their step and save. Another Ctrl-C ends them at once;
    if they are already saving, it takes two.
    """

    def __init__(self, job: Job, signals: StopSignals, say: Callable[[str], None]) -> None:
        self._job, self._signals, self._say = job, signals, say
        self._is_answered, self._repeats = False, 0

    def look(self) -> None:
        """React to requests since the last look.

        To end the ranks at once, raises `StoppedOnRequest` if nothing is lost, otherwise
        `RankFailed` if the user asked for it.
        """
        signals = self._signals
        if not signals.asked or (self._is_answered and signals.repeats == self._repeats):
            return
        ranks = range(self._job.layout.world)
        readings = [read_flight_recorder(self._job.folder.flight_recorder(rank)) for rank in ranks]
        if not self._is_answered:
            if has_made_no_progress(readings):
                raise StoppedOnRequest(f"stopped on request {self._kept()}")
            self._is_answered = True
            under_way = _under_way(readings, committed(self._job))
            self._say(f"stopping: {under_way}; Ctrl-C again ends at once, without saving")
        if signals.repeats > self._repeats:
            self._repeats = signals.repeats
            if signals.repeats > 1 or not _saving(readings):
                raise self._ended()
            self._say(f"step {_step(readings)} is being saved: Ctrl-C once more ends that, too")

    def _kept(self) -> str:
        saved = committed(self._job)
        if saved >= self._job.config.train.steps:
            return f"after the last step: all {saved} steps are saved"
        if saved:
            return f"before step {saved + 1} was done: step {saved} is saved"
        return "before the first step was done: there is nothing to save"

    def _ended(self) -> Exception:
        saved, done = committed(self._job), last_step(self._job)
        if saved >= done:
            return StoppedOnRequest(f"ended at once, as asked again: step {saved} is saved")
        newest = f"step {saved} is the newest that is saved" if saved else "no step is saved"
        return RankFailed(
            f"ended at once, as asked again: {newest}, steps lost: {done - saved}"
            f"\n{going_on(self._job)}"
        )


def has_made_no_progress(readings: Sequence[Reading | None]) -> bool:
    """Whether no rank has finished a step since its start, by their flight recorders."""
    return all(
        reading is None or (not reading.stepped_s and reading.phase in _BEFORE)
        for reading in readings
    )


def _saving(readings: Sequence[Reading | None]) -> bool:
    return any(reading is not None and reading.phase == "save" for reading in readings)


def _step(readings: Sequence[Reading | None]) -> int:
    return max((reading.step for reading in readings if reading is not None), default=0)


def _under_way(readings: Sequence[Reading | None], saved: int) -> str:
    """Return what the ranks still do before they stop; `saved` is the newest saved step."""
    step = _step(readings)
    phases = {reading.phase for reading in readings if reading is not None and reading.step == step}
    if "eval" in phases:
        leaving = "leaving the evaluation"
        return (
            f"{leaving}, step {step} is saved"
            if saved == step
            else f"{leaving}, saving step {step}"
        )
    return f"saving step {step}" if "save" in phases else f"finishing and saving step {step}"


def cut_short(job: Job) -> dict[str, Any]:
    """Return the end event of a run whose ranks were ended at once without a loss."""
    return {"event": "end", "step": committed(job), "loss": math.nan, "stopped": True}


def going_on(job: Job, rendezvous: Rendezvous | None = None) -> str:
    """Return the command that resumes a run that ended before its last step.

    With `rendezvous`, it is for the launcher that has started the ranks.
    """
    saved, run = committed(job), shlex.quote(str(job.folder.path))
    config, launcher = job.config, "meshwright"
    if (
        rendezvous is not None
        and starter(rendezvous) == "torchrun"
        and rendezvous.size == rendezvous.local_size
    ):
        launcher = f"torchrun --nproc-per-node {rendezvous.size} -m meshwright"
    elif rendezvous is not None:
        launcher = f"on the same {rendezvous.size} ranks: meshwright"
    if saved >= config.train.steps:
        return f"all {saved} steps are saved; to evaluate: meshwright eval {run}"
    if config.train.engine == "deepspeed":
        return f"DeepSpeed's engine keeps no state to resume from; {run} has its weights"
    if saved:
        return f"to resume: {launcher} train --resume {run}"
    name = "" if config.log.name is None else " log.name=NEW"
    return f"to start over: {launcher} train {run}/config.toml{name}"
