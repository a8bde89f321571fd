"""The process of a rank that measures or proves."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.comm.rendezvous import Rendezvous
from meshwright.comm.world import leave
from meshwright.errors import EXIT_DONE, EXIT_RANK_FAILED, ConfigError
from meshwright.runtime.ranks.worker import follow_parent, record_failure, tell_stacks
from meshwright.training.run_folder import RunFolder


def run_process(work: Callable[[Path, Rendezvous], None], threads: int = 1) -> None:
    """Run `work` as one rank for the folder on the command line, then end the process.

    `work` receives the folder and the rendezvous. torch uses `threads` threads. An exception is
    recorded in the folder, as by a training rank.
    """
    environ = os.environ
    tell_stacks()
    follow_parent(environ)
    path = Path(sys.argv[1])
    code = EXIT_DONE
    try:
        rendezvous = Rendezvous.from_environment(environ)
        if rendezvous is None:
            raise ConfigError("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set")
        torch.set_num_threads(threads)
        work(path, rendezvous)
        leave()
    except BaseException as error:
        traceback.print_exc()
        record_failure(RunFolder(path), int(environ.get("RANK", "0")), error)
        code = EXIT_RANK_FAILED
    end_process(code)


def end_process(code: int) -> None:
    """End this process without cleanup, which threads of a broken process group can block."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
