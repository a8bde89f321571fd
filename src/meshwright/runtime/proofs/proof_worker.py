"""One rank of a proof: `python -m meshwright.runtime.proofs.proof_worker FOLDER DEVICE`."""

from __future__ import annotations

import sys
import time
from typing import Final

from meshwright.comm.world import World, join
from meshwright.prove.suite import Suite
from meshwright.runtime.proofs.proof import ProofFolder
from meshwright.runtime.ranks.rank import run_process
from meshwright.training.events import JsonLines

# A collective of a tiny model that takes longer hangs, also where many ranks share few cores.
TIMEOUT_S: Final = 300.0


def prove_all(folder: ProofFolder, world: World) -> None:
    """Prove the cases in a folder in order; rank 0 writes the verdicts there."""
    suite = Suite(world, TIMEOUT_S)
    lines = JsonLines(folder.verdicts) if world.rank == 0 else None
    for index, case in enumerate(folder.read_cases()):
        if lines is not None:
            lines.write({"case": index})
        started = time.perf_counter()
        verdicts = suite.prove(case)
        if lines is not None:
            verdict_dicts = [verdict.as_dict() for verdict in verdicts]
            seconds = time.perf_counter() - started
            lines.write({"case": index, "seconds": seconds, "verdicts": verdict_dicts})


def main() -> None:
    """Run one rank of the proof in the folder named on the command line."""
    device = sys.argv[2]
    run_process(
        lambda path, rendezvous: prove_all(ProofFolder(path), join(rendezvous, device, TIMEOUT_S))
    )


if __name__ == "__main__":
    main()
