"""Runs whose ranks others start again: how an attempt finds the run of the one before it.

Rank 0 leaves the run's folder in a file beside it, under the id of the job. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from meshwright.execute.rendezvous import Rendezvous
from meshwright.launch.restart import restart_event
from meshwright.spec.loading import Config
from meshwright.train.run_folder import Job, RunFolder


def _note(config: Config, at: Rendezvous) -> Path:
    key = at.job or "none"
    if key == "none":  # torchrun's word where it was given no id
        key = f"{at.host}:{at.port}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Path(config.log.dir) / f".job-{digest}"


def recorded(config: Config, at: Rendezvous) -> Path | None:
    """Return the run folder of the attempt before this one, where there was one."""
    if at.attempt == 0:
        return None
    try:
        folder = Path(_note(config, at).read_text(encoding="utf-8"))
    except OSError:
        return None
    return folder if RunFolder(folder).plan.is_file() else None


def tell(job: Job, at: Rendezvous) -> None:
    """Leave word of this run for the attempts to come."""
    note = _note(job.config, at)
    temporary = note.with_suffix(".tmp")
    temporary.write_text(str(job.folder.path.resolve()), encoding="utf-8")
    temporary.replace(note)


def forget(job: Job, at: Rendezvous) -> None:
    """Take the word back, once the run has ended well."""
    _note(job.config, at).unlink(missing_ok=True)


def starter(at: Rendezvous) -> str:
    """Return the name of what has started these ranks."""
    kind = (at.job or "").partition("-")[0]
    return {"slurm": "Slurm", "ray": "Ray"}.get(kind, "torchrun")


def restarted(job: Job, at: Rendezvous) -> dict[str, Any]:
    """Return the event of this attempt; nobody tells why or when the last one ended."""
    causes = []
    for rank in range(job.layout.world):
        path = job.folder.failure(rank)
        if path.is_file():
            said = json.loads(path.read_text(encoding="utf-8"))
            causes.append((said["time"], f"rank {rank} raised {said['type']}: {said['message']}"))
    cause = min(causes)[1] if causes else f"{starter(at)} started the ranks again"
    return restart_event(job, at.attempt, cause, time.time(), None)
