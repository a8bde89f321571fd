"""The process of one rank: `python -m meshwright.launch.worker RUN_FOLDER`.

It joins the others, trains, and leaves either an exit code or a failure file that says why not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import torch

from meshwright.data import open_data
from meshwright.errors import (
    EXIT_DONE,
    EXIT_RANK_FAILED,
    EXIT_STOPPED,
    ConfigError,
    MeshwrightError,
)
from meshwright.execute.rendezvous import Rendezvous
from meshwright.execute.world import World, join, leave
from meshwright.launch.view import open_view
from meshwright.train.events import Event, Sink, open_sinks
from meshwright.train.loop import train
from meshwright.train.run_folder import Job, RunFolder, read_job


class StopRequest:
    """Whether this process was asked to stop; SIGTERM asks."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """Take SIGTERM as the request; Ctrl-C reaches the supervisor, which passes it on."""
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True


def follow_parent(environ: Mapping[str, str]) -> None:
    """End this process as soon as the supervisor is gone, however it went.

    The supervisor holds the other end of a pipe; reading it returns only when that end closes.
    """
    descriptor = environ.get("MESHWRIGHT_PARENT_FD")
    if descriptor is None:
        return

    def wait() -> None:
        os.read(int(descriptor), 1)
        os._exit(EXIT_RANK_FAILED)

    threading.Thread(target=wait, daemon=True, name="follow-parent").start()


def run_rank(job: Job, world: World, *, view: bool = False) -> int:
    """Train as one rank of a world and return the exit code.

    With `view`, rank 0 shows the run in the terminal, where no supervisor does.
    """
    stop = StopRequest()
    stop.listen()
    config = job.config
    dataset = open_data(config.data, job.cache, vocab_size=config.model.vocab_size)
    sinks: list[Sink] = []
    if world.rank == 0:
        sinks = open_sinks(config.log, job.folder.path, config.model_dump(mode="json"))
        sinks += [open_view(sys.stdout)] if view else []

    def emit(event: Event) -> None:
        for sink in sinks:
            sink.write(event)

    summary = train(job, world, dataset, emit, lambda: stop.asked)
    for sink in sinks:
        sink.close()
    leave()
    return EXIT_STOPPED if summary.stopped else EXIT_DONE


def record_failure(folder: RunFolder, rank: int, error: BaseException) -> None:
    """Write what ended this rank, for the supervisor to tell."""
    failure = {
        "rank": rank,
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "expected": isinstance(error, MeshwrightError),
        "traceback": "".join(traceback.format_exception(error)),
    }
    path = folder.failure(rank)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(failure), encoding="utf-8")
    temporary.replace(path)


def main() -> None:
    """Run one rank of the run folder named on the command line."""
    environ = os.environ
    follow_parent(environ)
    folder = RunFolder(Path(sys.argv[1]))
    rank = int(environ.get("RANK", "0"))
    try:
        job = read_job(folder.path)
        at = Rendezvous.from_environment(environ)
        if at is None:
            raise ConfigError("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set")
        torch.set_num_threads(job.machine.threads(job.layout.world))
        code = run_rank(job, join(at, job.machine.device))
    except BaseException as error:
        traceback.print_exc()
        record_failure(folder, rank, error)
        code = EXIT_RANK_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a broken process group can block a normal exit.
    os._exit(code)


if __name__ == "__main__":
    main()
