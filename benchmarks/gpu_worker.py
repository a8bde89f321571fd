"""The process that measures for `benchmarks.gpu`: python -m benchmarks.gpu_worker DEVICE.

One process for many rows, as importing torch and starting CUDA take longer than many a row. It
reads a request a line from its standard input, and answers in lines of JSON: what is found as soon
as it is, and last whether the row has ended or failed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

import torch

from benchmarks.gpu_alone import world_of_one
from benchmarks.gpu_machine import look
from benchmarks.gpu_profile import profiled
from meshwright.bench.calibrate import Effort, calibrate
from meshwright.bench.layouts import Stepper, Timed, peak_bytes, release, timed
from meshwright.comm.world import World
from meshwright.prove.case import Case
from meshwright.prove.suite import Suite

LINES: Final = 40  # of a traceback
Say = Callable[[Mapping[str, Any]], None]


class Work:
    """What can be asked for, on the one rank of a world."""

    def __init__(self, world: World) -> None:
        self._world, self._suite = world, Suite(world)

    def look(self, asked: Mapping[str, Any], say: Say) -> None:
        """Find out what device there is."""
        say(look(self._world.device))

    def train(self, asked: Mapping[str, Any], say: Say) -> None:
        """Time steps of a case, and then have one of them profiled."""
        case, world = Case.from_json(asked["case"]), self._world
        is_cpu = world.device.type == "cpu"

        def then(step: Stepper, found: Timed) -> None:
            peaks = peak_bytes(world, case) if is_cpu else found.peak_bytes
            say({"step_times_s": found.seconds, "peak_bytes": peaks})
            if asked["profiles"]:
                say({"profile": profiled(step, world.device)})

        torch.compiler.reset()
        timed(world, case, asked["steps"], then)

    def calibrate(self, asked: Mapping[str, Any], say: Say) -> None:
        """Measure the device with a case's blocks."""
        case = Case.from_json(asked["case"])
        found = calibrate(self._world, Effort(asked["budget_s"]), case, compiles=asked["compiles"])
        say(found)
        torch.compiler.reset()  # what it has compiled holds blocks
        if self._world.device.type == "cuda":
            release()

    def prove(self, asked: Mapping[str, Any], say: Say) -> None:
        """Hold a case on the device against one CPU."""
        verdicts = self._suite.prove(Case.from_json(asked["case"]))
        failed = [one.as_dict() for one in verdicts if not one.passed]
        say({"verdicts": len(verdicts), "failed": failed})


def serve(world: World, requests: TextIO, say: Say) -> None:
    """Answer requests until there are no more."""
    work = Work(world)
    for line in requests:
        asked = json.loads(line)
        try:
            getattr(work, asked["do"])(asked, say)
        except Exception as error:
            told = traceback.format_exc().splitlines()[-LINES:]
            is_memory = isinstance(error, torch.OutOfMemoryError)
            why = "out of memory" if is_memory else (str(error) or repr(error)).splitlines()[0]
            say({"failed": why, "told": told})
            del error
            if world.device.type == "cuda":
                release()
        else:
            say({"ended": True})


def main() -> None:
    """Join a world of this process alone, and serve it."""
    # Libraries print to standard output, too: answers go where it was, they to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(found: Mapping[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    device = torch.device(sys.argv[1], 0) if sys.argv[1] == "cuda" else torch.device(sys.argv[1])
    if device.type == "cuda":
        try:
            torch.cuda.set_device(device)
        except RuntimeError as error:  # the driver's own words
            say({"unreachable": str(error).splitlines()[0], "cuda": torch.version.cuda})
            return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with world_of_one(device) as world:
        serve(world, sys.stdin, say)


if __name__ == "__main__":
    main()
