"""`doctor RUN`: finds the state of a run from its flight recorders, failures, events and steps.

Only reads files, so the run may be training. Does not import torch.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshwright.checkpoint.commit import read_manifest, steps
from meshwright.errors import CheckpointError, ConfigError
from meshwright.parsing import foreign
from meshwright.program.events import Event, Events, ending
from meshwright.runtime.supervise.attempts import Recovery, recoveries, step_of
from meshwright.runtime.supervise.explain import (
    ELSEWHERE,
    Witness,
    explain,
    lost_a_peer,
    mismatch,
    raised,
    read_failure,
    witnesses,
)
from meshwright.runtime.supervise.lock import read_holder
from meshwright.training.run_folder import Job, RunFolder, read_job
from meshwright.units import counted, format_seconds

# Seconds without an entry after which a run that goes on is said to be silent.
SILENT_S: Final = 10.0


@dataclass(frozen=True)
class Diagnosis:
    """The state of a run, with evidence.

    `state`: "done", "stopped" on request, "running", "silent" (no activity for 10 s) or "failed".
    `reason` is in words. `witnesses` are the ranks as seen from outside, `failures` their
    exceptions by rank, `costs` those of restarts, `lost` the events of elastic replicas that were
    lost, `slow` those of slow ranks, and `good` names the newest intact step. `stacks` are files
    with the C++ stacks of ranks that crashed in any attempt.
    """

    run: Path
    state: str
    reason: str
    last_step: int
    witnesses: tuple[Witness, ...]
    failures: Mapping[int, str]
    costs: tuple[Recovery, ...]
    slow: tuple[Mapping[str, Any], ...]
    good: str
    stacks: Mapping[int, Path]
    lost: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_well(self) -> bool:
        """Whether the run is done, stopped on request or running."""
        return self.state in ("done", "stopped", "running")

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as a JSON-ready dict."""
        ranks = [
            {
                "rank": witness.rank,
                "process": witness.process,
                "place": witness.place,
                "waits_in": None if witness.waits_in is None else str(witness.waits_in),
                "failure": self.failures.get(witness.rank),
                "cpp_stacks": None
                if witness.rank not in self.stacks
                else str(self.stacks[witness.rank]),
            }
            for witness in self.witnesses
        ]
        return {
            "run": str(self.run),
            "state": self.state,
            "why": self.reason,
            "last_step": self.last_step,
            "ranks": ranks,
            "restarts": [cost._asdict() for cost in self.costs],
            "replicas_lost": [dict(event) for event in self.lost],
            "slow_ranks": [dict(event) for event in self.slow],
            "checkpoint": self.good,
        }


def diagnose(path: Path) -> Diagnosis:
    """Return the state of the run in a folder; raises `ConfigError` if there is none."""
    job = read_job(path)
    with foreign(f"what {path} holds of its run", ConfigError):
        return _diagnose(path, job)


def _diagnose(path: Path, job: Job) -> Diagnosis:
    folder, world = job.folder, job.layout.world
    seen = tuple(witnesses(folder, world))
    events = Events.read(folder.events) if folder.events.is_file() else Events()
    failures = {rank: failure for rank in range(world) if (failure := read_failure(folder, rank))}
    state, reason = _state(folder, seen, events, failures)
    return Diagnosis(
        path,
        state,
        reason,
        max((event["step"] for event in events if event["event"] == "step"), default=0),
        seen,
        {rank: _raised(failure) for rank, failure in failures.items()},
        tuple(recoveries(events)),
        tuple(event for event in events if event["event"] == "slow_rank"),
        _good(job),
        {rank: file for rank in range(world) if (file := folder.cpp_stacks(rank)).is_file()},
        tuple(event for event in events if event["event"] == "replica_lost"),
    )


def _raised(failure: Mapping[str, Any]) -> str:
    return f"{failure['type']}: {failure['message']}"


def _state(
    folder: RunFolder,
    seen: tuple[Witness, ...],
    events: Sequence[Event],
    failures: Mapping[int, Mapping[str, Any]],
) -> tuple[str, str]:
    """Return the state of a run, as in `Diagnosis`, and the reason for it in words."""
    if _is_held(folder, seen):
        clock_s = time.monotonic()
        local = [witness for witness in seen if witness.process != ELSEWHERE]
        moved = [witness.reading.at for witness in local if witness.reading is not None]
        silent = clock_s - max(moved) if moved else 0.0
        if silent < SILENT_S:
            return "running", "; ".join(
                f"rank {witness.rank} is in {witness.place}" for witness in seen
            )
        return "silent", f"nothing for {format_seconds(silent)}: {explain(seen, clock_s)}"
    last = ending(events)
    if last is not None and last["event"] == "end":
        if last["stopped"]:
            return "stopped", f"stopped on request after step {last['step']}"
        early = f", early: {last['early']}" if "early" in last else ""
        return "done", f"done after {counted(last['step'], 'step')}{early}"
    if last is not None:
        return "failed", str(last["cause"])
    # No supervisor has told: it was ended itself, or torchrun started the ranks.
    first = {rank: failure for rank, failure in failures.items() if not lost_a_peer(failure)}
    causes = [raised(rank, failure) for rank, failure in first.items()]
    return "failed", "; ".join([mismatch(seen), *causes]).strip("; ") or explain(seen)


def _is_held(folder: RunFolder, seen: tuple[Witness, ...]) -> bool:
    """Return whether a supervisor or a rank of the run is alive; True if on another machine."""
    holder = read_holder(folder.lock)
    if holder is None:
        return False
    if holder["host"] != socket.gethostname():
        return True
    return Path(f"/proc/{holder['pid']}").exists() or any(
        witness.process not in ("gone", ELSEWHERE) for witness in seen
    )


def _good(job: Job) -> str:
    """Return the newest step whose manifest is intact, and its folder, in words; else "none"."""
    for path in reversed(steps(job.checkpoints)):
        try:
            read_manifest(path)
        except CheckpointError:
            continue
        return f"step {step_of(path)}, {path}"
    return "none"
