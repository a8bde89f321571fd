"""The process of one rank of a proof: `python -m meshwright.launch.proof_worker FOLDER`."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Final

import torch

from meshwright.errors import EXIT_DONE, EXIT_RANK_FAILED, ConfigError
from meshwright.execute.rendezvous import Rendezvous
from meshwright.execute.world import World, join, leave
from meshwright.launch.proof import ProofFolder
from meshwright.launch.worker import follow_parent, record_failure
from meshwright.prove.suite import Suite
from meshwright.train.events import JsonLines
from meshwright.train.run_folder import RunFolder

# A collective of a tiny model that takes longer hangs, also where many ranks share few cores.
TIMEOUT_S: Final = 300.0


def prove_all(folder: ProofFolder, world: World) -> None:
    """Prove the folder's cases in their order; rank 0 writes what is found."""
    suite = Suite(world, TIMEOUT_S)
    lines = JsonLines(folder.verdicts) if world.rank == 0 else None
    for index, case in enumerate(folder.read_cases()):
        if lines is not None:
            lines.write({"case": index})
        started = time.perf_counter()
        verdicts = suite.prove(case)
        if lines is not None:
            found = [verdict.as_dict() for verdict in verdicts]
            seconds = time.perf_counter() - started
            lines.write({"case": index, "seconds": seconds, "verdicts": found})


def main() -> None:
    """Run one rank of the proof whose folder is named on the command line."""
    environ = os.environ
    follow_parent(environ)
    path = Path(sys.argv[1])
    code = EXIT_DONE
    try:
        at = Rendezvous.from_environment(environ)
        if at is None:
            raise ConfigError("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set")
        torch.set_num_threads(1)
        prove_all(ProofFolder(path), join(at, "cpu", TIMEOUT_S))
        leave()
    except BaseException as error:
        traceback.print_exc()
        record_failure(RunFolder(path), int(environ.get("RANK", "0")), error)
        code = EXIT_RANK_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a broken process group can block a normal exit.
    os._exit(code)


if __name__ == "__main__":
    main()
