"""One of several ranks on one GPU: python -m benchmarks.gpu_ranks_worker DEVICE RANK SIZE STORE.

It reads a case a line from its standard input, and answers each with a line of JSON.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Final, TextIO

import torch
import torch.distributed as dist

from benchmarks.staged import Staged
from meshwright.comm.rendezvous import loopback_interface
from meshwright.comm.world import World
from meshwright.prove.case import Case
from meshwright.prove.suite import Suite

LINES: Final = 30  # of a traceback
# A message that takes longer hangs. `benchmarks.gpu_ranks` waits less long for most cases.
TIMEOUT_S: Final = 180.0


def answer(suite: Suite, line: str) -> Mapping[str, Any]:
    """Prove a case, and return the verdicts, or what was raised."""
    try:
        case = Case.from_json(line)
        verdicts = suite.prove(case)
        if case.train.is_compiled:
            torch.compiler.reset()  # else later blocks are too many for its cache
        return {"verdicts": [verdict.as_dict() for verdict in verdicts]}
    except Exception as error:
        told = traceback.format_exc().splitlines()[-LINES:]
        return {"raised": (str(error) or repr(error)).splitlines()[0], "told": told}


def serve(world: World, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more."""
    suite = Suite(world, TIMEOUT_S)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in requests:
        print(json.dumps(answer(suite, line)), file=answers, flush=True)


def main() -> None:
    """Join the other ranks, and serve."""
    # Libraries print to standard output, too: answers go where it was, they to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1)  # where it is, if it hangs
    kind, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface() or "lo")
    store = dist.FileStore(sys.argv[4], size)
    backend = "cpu:gloo,cuda:gloo" if kind == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    with Staged(kind):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        # CPUs as if each were on a node of its own: they would share memory instead.
        nodes = tuple(map(str, range(size))) if kind == "cpu" else ()
        serve(World(rank, size, device, store, nodes=nodes), sys.stdin, answers)
    os._exit(0)  # without waiting for connections that others have closed


if __name__ == "__main__":
    main()
