"""Attempts: failed ranks are restarted as long as that makes progress. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint.commit import steps
from meshwright.comm.flight_recorder_file import Reading, read_flight_recorder
from meshwright.errors import NoProgress
from meshwright.program.events import Event
from meshwright.report.figure import finite
from meshwright.runtime.supervise.supervisor import RanksFailed
from meshwright.training.events import append_event
from meshwright.training.run_folder import Job


def run_attempts(
    job: Job,
    run: Callable[[int], int],
    stop: Callable[[], bool],
    tell: Callable[[Event], None] | None = None,
) -> int:
    """Call `run` with the number of each attempt until one ends well; returns its exit code.

    Before each further attempt, an event with the cause goes to `tell`, by default to the run's
    events. Raises what `run` raises if another attempt cannot help, or if `stop` says that none is
    wanted, and `NoProgress` after `checkpoint.restarts` in a row without progress.
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
                    f"no progress beyond step {furthest} though the ranks were started again "
                    f"{times} (checkpoint.restarts = {limit}). The last failure: {error}"
                ) from error
            attempt, failures_in_a_row = attempt + 1, failures_in_a_row + 1
            event = restart_event(job, attempt, failure.cause, error.noticed, error.detect_s)
            tell(event)


def reached(job: Job) -> int:
    """Return the newest committed step, or without intermediate saves the last one done."""
    return committed(job) if job.config.checkpoint.every else last_step(job)


def committed(job: Job) -> int:
    """Return the newest committed step; 0 where there is none."""
    return max((step_of(path) for path in steps(job.checkpoints)), default=0)


def step_of(path: Path) -> int:
    """Return the step of a step folder."""
    return int(path.name.removeprefix("step-"))


def last_step(job: Job) -> int:
    """Return the last step that any rank finished in the latest attempt, from the recorders."""
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
    """Return the event of a restart: the number of the next attempt, the cause, the cost.

    `noticed` is the time in seconds since 1970, and `detect_s` the most seconds since the failure;
    None if nobody watched.
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
    """Return the event of a failure after which the ranks are not restarted."""
    return {
        "event": "failed",
        "time": error.noticed,
        "cause": error.first.cause,
        "kind": error.first.kind,
        "detect_s": error.detect_s,
    }


class Recovery(NamedTuple):
    """The cost of one failure, in seconds: until it was noticed, until ranks were ready again.

    `lost_s` is the time of the repeated steps; None if it is unknown.
    """

    attempt: int
    cause: str
    detect_s: float | None
    restart_s: float | None
    lost_steps: int
    lost_s: float | None

    @property
    def seconds(self) -> float:
        """The sum of the known parts."""
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
    """Return the seconds between two events, by the clocks of two processes; None if not known."""
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
