"""`doctor RUN`: the state of a run in words, from its recorders, failures, events and steps.

It only reads, so the run may be training. No torch here.
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
from meshwright.runtime.supervise.restart import Recovery, recoveries, step_of
from meshwright.training.run_folder import Job, RunFolder, read_job
from meshwright.units import counted, format_seconds

# Seconds without an entry after which a run that goes on is said to be silent.
SILENT_S: Final = 10.0


@dataclass(frozen=True)
class Diagnosis:
    """The state of a run.

    `state`: "done", "stopped" on request, "running", "silent" (no activity for a while) or
    "failed". `why` is in words; `failures` are the ranks' exceptions, by rank. `stacks` are the
    files with the C++ stacks of ranks that crashed, in this attempt or an earlier one.
    """

    run: Path
    state: str
    why: str
    last_step: int
    witnesses: tuple[Witness, ...]
    failures: Mapping[int, str]
    costs: tuple[Recovery, ...]
    slow: tuple[Mapping[str, Any], ...]
    good: str
    stacks: Mapping[int, Path]

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.state in ("done", "stopped", "running")

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        ranks = [
            {
                "rank": one.rank,
                "process": one.process,
                "place": one.place,
                "waits_in": None if one.waits_in is None else str(one.waits_in),
                "failure": self.failures.get(one.rank),
                "cpp_stacks": None if one.rank not in self.stacks else str(self.stacks[one.rank]),
            }
            for one in self.witnesses
        ]
        return {
            "run": str(self.run),
            "state": self.state,
            "why": self.why,
            "last_step": self.last_step,
            "ranks": ranks,
            "restarts": [cost._asdict() for cost in self.costs],
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
    found = tuple(witnesses(folder, world))
    events = Events.read(folder.events) if folder.events.is_file() else Events()
    failures = {rank: said for rank in range(world) if (said := read_failure(folder, rank))}
    state, why = _state(folder, found, events, failures)
    return Diagnosis(
        path,
        state,
        why,
        max((event["step"] for event in events if event["event"] == "step"), default=0),
        found,
        {rank: _raised(said) for rank, said in failures.items()},
        tuple(recoveries(events)),
        tuple(event for event in events if event["event"] == "slow_rank"),
        _good(job),
        {rank: file for rank in range(world) if (file := folder.cpp_stacks(rank)).is_file()},
    )


def _raised(said: Mapping[str, Any]) -> str:
    return f"{said['type']}: {said['message']}"


def _state(
    folder: RunFolder,
    found: tuple[Witness, ...],
    events: Sequence[Event],
    failures: Mapping[int, Mapping[str, Any]],
) -> tuple[str, str]:
    """Return the state of a run and why it is in it."""
    if _is_held(folder, found):
        now = time.monotonic()
        here = [one for one in found if one.process != ELSEWHERE]
        moved = [one.reading.at for one in here if one.reading is not None]
        silent = now - max(moved) if moved else 0.0
        if silent < SILENT_S:
            return "running", "; ".join(f"rank {one.rank} is in {one.place}" for one in found)
        return "silent", f"nothing for {format_seconds(silent)}: {explain(found, now)}"
    last = ending(events)
    if last is not None and last["event"] == "end":
        if last["stopped"]:
            return "stopped", f"stopped on request after step {last['step']}"
        early = f", early: {last['early']}" if "early" in last else ""
        return "done", f"done after {counted(last['step'], 'step')}{early}"
    if last is not None:
        return "failed", str(last["cause"])
    # No supervisor has told: it was ended itself, or torchrun started the ranks.
    first = {rank: said for rank, said in failures.items() if not lost_a_peer(said)}
    parts = [raised(rank, said) for rank, said in first.items()]
    return "failed", "; ".join([mismatch(found), *parts]).strip("; ") or explain(found)


def _is_held(folder: RunFolder, found: tuple[Witness, ...]) -> bool:
    """Whether a supervisor or a rank of the run is there; on another machine it is taken for so."""
    holder = read_holder(folder.lock)
    if holder is None:
        return False
    if holder["host"] != socket.gethostname():
        return True
    return Path(f"/proc/{holder['pid']}").exists() or any(
        one.process not in ("gone", ELSEWHERE) for one in found
    )


def _good(job: Job) -> str:
    """Say which is the newest step whose manifest is whole."""
    for path in reversed(steps(job.checkpoints)):
        try:
            read_manifest(path)
        except CheckpointError:
            continue
        return f"step {step_of(path)}, {path}"
    return "none"
