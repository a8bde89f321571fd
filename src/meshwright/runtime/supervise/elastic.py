"""Runs that other launchers restart: how an attempt finds the run of the previous one.

Rank 0 leaves a record of the run in a file next to its folder, under the job's id. A killed job
leaves its record behind, and a new job with the same id must not use it. No torch here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.comm.interfaces import boot_id
from meshwright.comm.rendezvous import Rendezvous
from meshwright.errors import ConfigError
from meshwright.files import write_atomic
from meshwright.parsing import parse_json
from meshwright.runtime.supervise.explain import raised, read_failure
from meshwright.runtime.supervise.restart import restart_event
from meshwright.spec.loading import Config
from meshwright.training.run_folder import Job, read_job


def _note(config: Config, rendezvous: Rendezvous) -> Path:
    key = rendezvous.job or "none"
    if key == "none":  # torchrun's word where it was given no id
        key = f"{rendezvous.host}:{rendezvous.port}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Path(config.log.dir) / f".job-{digest}"


class Word(NamedTuple):
    """Rank 0's record: its run's folder and id, a digest of the given config, and who started it.

    `host` is its machine, `agent` the torchrun there, `parent` the process that started rank 0,
    with its start time.
    """

    folder: str
    run: str
    config: str
    host: list[str]
    agent: str | None
    parent: list[int]


def read_word(note: Path) -> Word | None:
    """Return a file's record of a job; None if it is missing or damaged."""
    try:
        word = Word(**parse_json(note.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    is_whole = isinstance(word.folder, str) and isinstance(word.parent, list)
    return word if is_whole and len(word.parent) == 2 else None


def recorded(config: Config, rendezvous: Rendezvous, say: Callable[[str], None]) -> Path | None:
    """Return the run folder of the previous attempt, if there was one.

    Removes the record of another job; unless this is a first attempt, `say` receives a line about
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
    """Whether a record was left by an earlier attempt of this job."""
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
                return False  # what started it is gone, and its job with it
            return word.config == _asked(config)
    return False


def tell(job: Job, config: Config, rendezvous: Rendezvous) -> None:
    """Leave a record of this run for later attempts; `config` is the given one."""
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
    """Return a digest of a config; the cluster of a later attempt may be smaller."""
    text = json.dumps(config.model_dump(mode="json", exclude={"cluster"}), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _host() -> list[str]:
    return [socket.gethostname(), boot_id()]


def _began(pid: int) -> int:
    """Return when a process of this machine began, in ticks since the boot; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def forget(job: Job, rendezvous: Rendezvous) -> None:
    """Remove the record, after the run has ended well."""
    _note(job.config, rendezvous).unlink(missing_ok=True)


def starter(rendezvous: Rendezvous) -> str:
    """Return the name of the launcher of these ranks."""
    kind = (rendezvous.job or "").partition("-")[0]
    return {"slurm": "Slurm", "ray": "Ray"}.get(kind, "torchrun")


def restarted(job: Job, rendezvous: Rendezvous) -> dict[str, Any]:
    """Return the event of this attempt; the cause and time of the last end are unknown."""
    causes = []
    for rank in range(job.layout.world):
        failure = read_failure(job.folder, rank)
        if failure is not None:
            causes.append((failure["time"], raised(rank, failure)))
    cause = min(causes)[1] if causes else f"{starter(rendezvous)} started the ranks again"
    return restart_event(job, rendezvous.attempt, cause, time.time(), None)
