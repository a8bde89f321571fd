"""Starts local ranks that measure, and passes on rank 0's results.

Does not import torch: the ranks are processes of `runtime.measure.bench_worker`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from meshwright.errors import StoppedOnRequest
from meshwright.runtime.machines.machine import (
    check_build,
    check_torch,
    find_gpus,
    torch_build,
)
from meshwright.runtime.ranks.local import rank_environ
from meshwright.runtime.supervise.supervisor import (
    LocalRanks,
    StopSignals,
    Timing,
    listen_on_loopback,
    supervise,
)
from meshwright.runtime.supervise.view import EventTail
from meshwright.training.run_folder import RunFolder

REQUEST: Final = "request.json"
FOUND: Final = "found.jsonl"


def measure_on_ranks(
    request: Mapping[str, Any],
    ranks: int,
    environ: Mapping[str, str],
    show: Callable[[dict[str, Any]], None],
    *,
    threads: int = 1,
    keeps_memory: bool = True,
) -> None:
    """Run a measurement request on local ranks; `show` receives each result.

    `threads` and `keeps_memory` are as in `rank_environ`. Raises `RankFailed` if a rank fails,
    `StoppedOnRequest` on SIGINT or SIGTERM, `ConfigError` if torch is not installed or lacks
    support for this machine's GPUs.
    """
    check_torch("measuring")
    check_build(request["device"], find_gpus(environ), torch_build())
    timing, on_gpus = Timing(), request["device"] == "cuda"
    with StopSignals() as signals, tempfile.TemporaryDirectory(prefix="meshwright-bench-") as path:
        folder = Path(path)
        (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        tail = EventTail(folder / FOUND)

        def look() -> None:
            for result in tail.new():
                show(result)
            if signals.asked:
                raise StoppedOnRequest("stopped on request")

        processes = LocalRanks(
            [sys.executable, "-m", "meshwright.runtime.measure.bench_worker", path],
            ranks,
            RunFolder(folder),
            rank_environ(environ, threads, keeps_memory=keeps_memory, on_gpus=on_gpus),
            listen_on_loopback(None),
            timing,
        )
        with processes:
            supervise(processes, look, timing, lambda: False)
        look()
