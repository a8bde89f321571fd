"""One rank that measures: `python -m meshwright.runtime.measure.bench_worker FOLDER`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from meshwright.bench.calibrate import Effort, block_seconds, calibrate, quick
from meshwright.bench.layouts import side_by_side
from meshwright.comm.rendezvous import Rendezvous
from meshwright.comm.world import World, join
from meshwright.prove.case import Case
from meshwright.runtime.measure.benchmark import FOUND, REQUEST
from meshwright.runtime.ranks.rank import run_process
from meshwright.training.events import JsonLines

TIMEOUT_S: Final = 300.0


def measure(request: Mapping[str, Any], world: World) -> Iterator[dict[str, Any]]:
    """Yield the results of a measurement request as they become available.

    `request["what"]` is "device", "blocks" or else layouts to compare. All ranks must call this.
    """
    if request["what"] == "device":
        case, budget_s = Case.from_json(request["case"]), request["budget_s"]
        effort = quick(case.train.precision) if budget_s is None else Effort(budget_s)
        yield calibrate(world, effort, case, compiles=request["compiles"])
        return
    if request["what"] == "blocks":
        case = Case.from_json(request["case"])
        yield {"seconds": block_seconds(world, request["budget_s"], case)}
        return
    cases = [Case.from_json(text) for text in request["cases"]]
    yield from side_by_side(world, cases, request["rounds"], request["steps"], request["also"])


def measure_all(path: Path, rendezvous: Rendezvous) -> None:
    """Join the other ranks and run the request in a folder; rank 0 writes the results there."""
    request = json.loads((path / REQUEST).read_text(encoding="utf-8"))
    world = join(rendezvous, request["device"], TIMEOUT_S)
    lines = JsonLines(path / FOUND) if world.rank == 0 else None
    for result in measure(request, world):
        if lines is not None:
            lines.write(result)


def main() -> None:
    """Run one rank of the measurement in the folder named on the command line."""
    run_process(measure_all, int(os.environ.get("OMP_NUM_THREADS", "1")))


if __name__ == "__main__":
    main()
