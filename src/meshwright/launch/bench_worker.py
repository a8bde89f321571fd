"""The process of one rank that measures: `python -m meshwright.launch.bench_worker FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from meshwright.bench.calibrate import calibrate
from meshwright.bench.layouts import side_by_side
from meshwright.errors import EXIT_DONE, EXIT_RANK_FAILED, ConfigError
from meshwright.execute.rendezvous import Rendezvous
from meshwright.execute.world import World, join, leave
from meshwright.launch.benchmark import FOUND, REQUEST
from meshwright.launch.worker import follow_parent, record_failure
from meshwright.prove.case import Case
from meshwright.train.events import JsonLines
from meshwright.train.run_folder import RunFolder

TIMEOUT_S: Final = 300.0


def measure(request: Mapping[str, Any], world: World) -> Iterator[dict[str, Any]]:
    """Yield what a request asks for, as it is found; all ranks of the world do."""
    if request["what"] == "device":
        yield calibrate(world, request["budget_s"])
        return
    cases = [Case.from_json(text) for text in request["cases"]]
    yield from side_by_side(
        world, cases, request["rounds"], request["steps"], with_memory=request["memory"]
    )


def main() -> None:
    """Run one rank of the measurement whose folder is named on the command line."""
    environ = os.environ
    follow_parent(environ)
    path = Path(sys.argv[1])
    code = EXIT_DONE
    try:
        at = Rendezvous.from_environment(environ)
        if at is None:
            raise ConfigError("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set")
        request = json.loads((path / REQUEST).read_text(encoding="utf-8"))
        torch.set_num_threads(1)
        world = join(at, request["device"], TIMEOUT_S)
        lines = JsonLines(path / FOUND) if world.rank == 0 else None
        for found in measure(request, world):
            if lines is not None:
                lines.write(found)
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
