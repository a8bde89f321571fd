"""`RankSet`: some ranks, which are processes on one device and prove case after case."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from meshwright.prove.case import Case
from meshwright.runtime.ranks.local import rank_environ

# Seconds to import torch and start CUDA.
_START_S: Final = 120.0
# Seconds for the others to answer after a rank has raised, and for one to say where it hangs.
_SETTLE_S: Final = 2.0
_TRACE_S: Final = 0.5
# Lines of what a rank has said on standard error.
_LINES: Final = 40

Found = Mapping[str, Any]


class RankSet:
    """So many ranks on a device; what they find is what each of them answers."""

    def __init__(self, device: str, world: int) -> None:
        """Start the ranks, without waiting for them."""
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-ranks-")
        self._answers: queue.Queue[tuple[int, str]] = queue.Queue()
        self._is_ready = False
        environ = rank_environ(os.environ, on_gpus=device == "cuda")
        self._ranks = []
        for rank in range(world):
            words = [device, str(rank), str(world), str(Path(self._folder.name) / "store")]
            with self._told(rank).open("w", encoding="utf-8") as told:
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.gpu_ranks_worker", *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=told,
                    text=True,
                    env=environ,
                )
            self._ranks.append(process)
            assert process.stdout is not None
            threading.Thread(target=self._read, args=(rank, process.stdout), daemon=True).start()

    def started(self, ends: float) -> Found:
        """Wait for the ranks to be there; returns what kept them, or nothing."""
        if self._is_ready:
            return {}
        found = self._all(min(ends, time.monotonic() + _START_S), ends)
        self._is_ready = "raised" not in found
        return {} if self._is_ready else found

    def prove(self, case: Case, seconds: float, ends: float) -> Found:
        """Return the verdicts on a case, or what was raised; then nothing more can be proven.

        A case that takes longer hangs, unless it is cut off because the time ends.
        """
        for process in self._ranks:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{case.as_json()}\n")
                process.stdin.flush()
            except BrokenPipeError:
                continue  # its end is told by its answers
        return self._all(min(ends, time.monotonic() + seconds), ends)

    def close(self) -> None:
        """End the ranks."""
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.wait()
        self._folder.cleanup()

    def _read(self, rank: int, answers: TextIO) -> None:
        for line in answers:
            self._answers.put((rank, line))
        self._answers.put((rank, ""))

    def _told(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.txt"

    def _all(self, until: float, ends: float) -> Found:
        """Return rank 0's answer once all have answered, or that of one that failed."""
        found: dict[int, Found] = {}
        failed: Found = {}
        while len(found) < len(self._ranks):
            try:
                rank, line = self._answers.get(timeout=max(until - time.monotonic(), 0))
            except queue.Empty:
                late = [rank for rank in range(len(self._ranks)) if rank not in found]
                return failed or self._hung(late, ends)
            found[rank] = json.loads(line) if line else self._ended(rank)
            if "raised" in found[rank] and not failed:
                failed = found[rank]
                until = min(until, time.monotonic() + _SETTLE_S)
        return failed or found[0]

    def _ended(self, rank: int) -> Found:
        code = self._ranks[rank].wait()
        return {"raised": f"rank {rank} ended with code {code}", "told": self._last(rank)}

    def _hung(self, ranks: list[int], ends: float) -> Found:
        """Return where ranks are that have not answered."""
        for rank in ranks:
            self._ranks[rank].send_signal(signal.SIGUSR1)
        time.sleep(_TRACE_S)
        told = [line for rank in ranks for line in (f"rank {rank}:", *self._last(rank))]
        late = " and ".join(map(str, ranks))
        is_over = time.monotonic() >= ends
        return {"raised": f"no answer of rank {late}", "told": told, "no time": is_over}

    def _last(self, rank: int) -> list[str]:
        told = self._told(rank).read_text("utf-8", "replace").splitlines()
        return told[-_LINES:]
