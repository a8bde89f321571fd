"""Attempts of a run: restarts of failed ranks, here or by another launcher, and stop requests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshwright.checkpoint.commit import steps
from meshwright.comm.flight_recorder_file import Reading, read_flight_recorder
from meshwright.comm.interfaces import boot_id
from meshwright.comm.rendezvous import Rendezvous
from meshwright.errors import ConfigError, NoProgress, RankFailed, StoppedOnRequest
from meshwright.files import write_atomic
from meshwright.parsing import parse_json
from meshwright.program.events import Event
from meshwright.report.figure import finite
from meshwright.runtime.supervise.explain import raised, read_failure
from meshwright.runtime.supervise.supervisor import RanksFailed, StopSignals
from meshwright.spec.loading import Config
from meshwright.store import Place
from meshwright.training.events import append_event
from meshwright.training.run_folder import Job, read_job


def run_attempts(
    job: Job,
    run: Callable[[int], int],
    stop: Callable[[], bool],
    tell: Callable[[Event], None] | None = None,
) -> int:
    """Call `run` with the number of each attempt until one succeeds, and return its exit code.

    Before each further attempt an event with the cause is passed to `tell`, by default appended to
    the run's events. Re-raises the failure of `run` if another attempt cannot help or `stop`
    returns true, and raises `NoProgress` after `checkpoint.restarts` failures in a row without
    progress.
    """
    limit = job.config.checkpoint.restarts
    tell = tell or (lambda event: append_event(job.folder.events, event))
    furthest, failures_in_a_row, last_deed = reached(job), 0, ""
    attempt = 0
    while True:
        try:
            return run(attempt)
        except RanksFailed as error:
            failure = error.first
            is_again = bool(failure.deed) and failure.deed == last_deed
            if limit == 0 or not failure.can_retry or is_again or stop():
                tell(failed_event(error))
                raise
            last_deed, furthest_before, furthest = (
                failure.deed,
                furthest,
                max(furthest, reached(job)),
            )
            failures_in_a_row = 0 if furthest > furthest_before else failures_in_a_row
            if failures_in_a_row == limit:
                tell(failed_event(error))
                times = "once" if limit == 1 else f"{limit} times"
                raise NoProgress(
                    f"no progress beyond step {furthest} though the ranks were restarted "
                    f"{times} (checkpoint.restarts = {limit}). The last failure: {error}"
                ) from error
            attempt, failures_in_a_row = attempt + 1, failures_in_a_row + 1
            event = restart_event(job, attempt, failure.cause, error.noticed, error.detect_s)
            tell(event)


def reached(job: Job) -> int:
    """Return how far a run has got: its newest committed step or, if it saves none, its last."""
    return committed(job) if job.config.checkpoint.every else last_step(job)


def committed(job: Job) -> int:
    """Return the number of the newest committed step; 0 if there is none."""
    return max((step_of(path) for path in steps(job.checkpoints)), default=0)


def step_of(path: Place) -> int:
    """Return the step number of a folder named `step-N`."""
    return int(path.name.removeprefix("step-"))


def last_step(job: Job) -> int:
    """Return the last step that any rank of the latest attempt finished, by flight recorders."""
    readings = (
        read_flight_recorder(job.folder.flight_recorder(rank)) for rank in range(job.layout.world)
    )
    return max((_done(reading) for reading in readings if reading is not None), default=0)


def _done(reading: Reading) -> int:
    is_over = reading.phase in ("eval", "save", "end")
    return reading.step if is_over else max(0, reading.step - 1)


def restart_event(
    job: Job, attempt: int, cause: str, noticed: float, detect_s: float | None
) -> dict[str, Any]:
    """Return the event of a restart, with the number of the next attempt, the cause and lost steps.

    `noticed` is the time of detection, in seconds since 1970. `detect_s` is an upper bound on the
    seconds between failure and detection; None if the ranks were not watched.
    """
    from_step = committed(job)
    return {
        "event": "restart",
        "time": noticed,
        "attempt": attempt,
        "cause": cause,
        "detect_s": detect_s,
        "from_step": from_step,
        "lost_steps": max(0, last_step(job) - from_step),
    }


def failed_event(error: RanksFailed) -> dict[str, Any]:
    """Return the "failed" event of a failure after which the ranks are not restarted."""
    return {
        "event": "failed",
        "time": error.noticed,
        "cause": error.first.cause,
        "kind": error.first.kind,
        "detect_s": error.detect_s,
    }


class Recovery(NamedTuple):
    """The cost in seconds of one failure: detection, restart, repeated steps; None if unknown."""

    attempt: int
    cause: str
    detect_s: float | None
    restart_s: float | None
    lost_steps: int
    lost_s: float | None

    @property
    def seconds(self) -> float:
        """The sum of the known costs, in seconds."""
        return sum(part for part in (self.detect_s, self.restart_s, self.lost_s) if part)


def recoveries(events: Iterable[Mapping[str, Any]]) -> Iterator[Recovery]:
    """Yield the cost of each restart in a run's events."""
    pending: Mapping[str, Any] | None = None
    step_s: float | None = None
    for event in events:
        if event["event"] == "step":
            step_s = event["step_time_s"]
        elif event["event"] == "restart":
            if pending is not None:  # it failed before its ranks were ready
                yield _recovery(pending, None, step_s)
            pending = event
        elif event["event"] == "start" and pending is not None:
            yield _recovery(pending, _between(pending, event), step_s)
            pending = None
    if pending is not None:
        yield _recovery(pending, None, step_s)


def _between(event: Mapping[str, Any], later: Mapping[str, Any]) -> float | None:
    """Return the seconds between two events; None if unknown or negative.

    The events may be from different processes' clocks.
    """
    times = finite(event.get("time")), finite(later.get("time"))
    if times[0] is None or times[1] is None or times[1] < times[0]:
        return None
    return times[1] - times[0]


def _recovery(event: Mapping[str, Any], ready_s: float | None, step_s: float | None) -> Recovery:
    lost = event["lost_steps"]
    lost_s = 0.0 if not lost else None if step_s is None else lost * step_s
    return Recovery(
        event["attempt"], event["cause"], finite(event.get("detect_s")), ready_s, lost, lost_s
    )


def _note(config: Config, rendezvous: Rendezvous) -> Path:
    key = rendezvous.job or "none"
    if key == "none":  # torchrun's word where it was given no id
        key = f"{rendezvous.host}:{rendezvous.port}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Path(config.log.dir) / f".job-{digest}"


class Word(NamedTuple):
    """Rank 0's record of its run, by which a restarted attempt of the same job finds it.

    It has the run's folder and id, a digest of the given config, the host, torchrun's `agent`
    process there, and the `parent` process of rank 0 with its start time.
    """

    folder: str
    run: str
    config: str
    host: list[str]
    agent: str | None
    parent: list[int]


def read_word(note: Path) -> Word | None:
    """Return the record in a file; None if it is missing or damaged."""
    try:
        word = Word(**parse_json(note.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    is_whole = isinstance(word.folder, str) and isinstance(word.parent, list)
    return word if is_whole and len(word.parent) == 2 else None


def recorded(config: Config, rendezvous: Rendezvous, say: Callable[[str], None]) -> Path | None:
    """Return the run folder of this job's previous attempt, or None.

    Removes the record of another job; if this is not a first attempt, `say` receives a line about
    it.
    """
    note = _note(config, rendezvous)
    word = read_word(note)
    if word is None:
        return None
    if rendezvous.attempt and _is_own(word, config, rendezvous):
        return Path(word.folder)
    note.unlink(missing_ok=True)
    if rendezvous.attempt:
        say(f"note: {word.folder} is of another job with the id {rendezvous.job}: a new run begins")
    return None


def _is_own(word: Word, config: Config, rendezvous: Rendezvous) -> bool:
    """Return whether an earlier attempt of this job left the record."""
    with contextlib.suppress(ConfigError):
        if read_job(Path(word.folder)).run == word.run:
            if starter(rendezvous) != "torchrun":  # a scheduler gives no id twice
                return True
            if word.agent is not None and word.agent == rendezvous.agent:
                return True
            is_here = word.host == _host()
            if (
                is_here
                and word.agent != rendezvous.agent
                and _began(word.parent[0]) != word.parent[1]
            ):
                return False  # its launcher is gone, and so is its job
            return word.config == _asked(config)
    return False


def tell(job: Job, config: Config, rendezvous: Rendezvous) -> None:
    """Write a record of this run for later attempts; `config` is as the user gave it."""
    note, parent = _note(config, rendezvous), os.getppid()
    word = Word(
        folder=str(job.folder.path.resolve()),
        run=job.run,
        config=_asked(config),
        host=_host(),
        agent=rendezvous.agent,
        parent=[parent, _began(parent)],
    )
    write_atomic(note, json.dumps(word._asdict()).encode())


def _asked(config: Config) -> str:
    """Return a digest of a config without `cluster`, which may be smaller in a later attempt."""
    text = json.dumps(config.model_dump(mode="json", exclude={"cluster"}), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _host() -> list[str]:
    return [socket.gethostname(), boot_id()]


def _began(pid: int) -> int:
    """Return a process's start time in clock ticks since boot; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def forget(job: Job, rendezvous: Rendezvous) -> None:
    """Remove the record for later attempts, after the run has succeeded."""
    _note(job.config, rendezvous).unlink(missing_ok=True)


def starter(rendezvous: Rendezvous) -> str:
    """Return the name of the ranks' launcher: "Slurm", "Ray" or "torchrun"."""
    kind = (rendezvous.job or "").partition("-")[0]
    return {"slurm": "Slurm", "ray": "Ray"}.get(kind, "torchrun")


def restarted(job: Job, rendezvous: Rendezvous) -> dict[str, Any]:
    """Return the "restart" event of an attempt that another launcher started.

    Its cause is the first recorded exception of the ranks, if any; when they ended is unknown.
    """
    causes = []
    for rank in range(job.layout.world):
        failure = read_failure(job.folder, rank)
        if failure is not None:
            causes.append((failure["time"], raised(rank, failure)))
    cause = min(causes)[1] if causes else f"{starter(rendezvous)} started the ranks again"
    return restart_event(job, rendezvous.attempt, cause, time.time(), None)


# Phases before the end of a first step.
_BEFORE: Final = ("start", "load", "data", "forward", "backward", "reduce")


class Stopping:
    """Handles the user's requests to stop the local ranks of a job; `say` shows a line.

    The first request makes the ranks finish their step and save. Another Ctrl-C ends them at once;
    if they are already saving, it takes two.
    """

    def __init__(self, job: Job, signals: StopSignals, say: Callable[[str], None]) -> None:
        self._job, self._signals, self._say = job, signals, say
        self._is_answered, self._repeats = False, 0

    def look(self) -> None:
        """Answer the stop requests since the last call: the first by a line on what is saved first.

        Raises if the ranks should not be waited for, so that the caller ends them: because no step
        was begun yet, or because of a repeated request. That is `StoppedOnRequest` if every
        finished step is saved, else `RankFailed`, which says how many steps are lost.
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
    """Return whether no rank has finished a step since its start, by the flight recorders."""
    return all(
        reading is None or (not reading.stepped_s and reading.phase in _BEFORE)
        for reading in readings
    )


def _saving(readings: Sequence[Reading | None]) -> bool:
    return any(reading is not None and reading.phase == "save" for reading in readings)


def _step(readings: Sequence[Reading | None]) -> int:
    return max((reading.step for reading in readings if reading is not None), default=0)


def _under_way(readings: Sequence[Reading | None], saved: int) -> str:
    """Return in words what the ranks do before they stop; `saved` is the newest saved step."""
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
    """Return the "end" event of a run whose ranks were ended at once without losing a step."""
    return {"event": "end", "step": committed(job), "loss": math.nan, "stopped": True}


def going_on(job: Job, rendezvous: Rendezvous | None = None) -> str:
    """Return the command that resumes a run that has ended before its last step.

    With `rendezvous`, it is a command for the launcher that started the ranks.
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
