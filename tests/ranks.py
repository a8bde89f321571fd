"""`@ranks(n)`: a test whose body runs on n ranks at once, in a pool of gloo workers.

A pool starts once per world size and file of tests. After a failure or a time-out it is thrown
away, since its process group may hang. Its processes are `python -m ranks RANK N STORE PIPE`, which
`forking.py` forks from a server without a process group: a fork after gloo has started deadlocks.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch

from meshwright.runtime.supervise.crash_records import (
    allow_core_dump,
    take_core_dump,
    write_stacks,
)

TIMEOUT_S = 300.0
HERE = Path(__file__).parent
# Where ranks import the modules of tests from: a body is known by the name of its module.
FOLDERS = [str(HERE), *sorted({str(file.parent) for file in HERE.glob("*/test_*.py")})]


def ranks(n: int):
    """Run the decorated `body(world, **fixtures)` on n ranks; fixtures must be picklable."""

    def decorate(body):
        @functools.wraps(body)
        def test(**fixtures: Any) -> None:
            on_ranks(n, body, **fixtures)

        # pytest reads fixtures off the signature; `world` is not one.
        del test.__wrapped__
        import inspect

        parameters = list(inspect.signature(body).parameters.values())[1:]
        test.__signature__ = inspect.Signature(parameters)
        test.body = body
        return test

    return decorate


def on_ranks(n: int, body, **arguments: Any) -> list[Any]:
    """Return what `body(world, **arguments)` returns on each of n ranks; raises what one raises."""
    pool = _POOLS.get(n)
    if pool is None or not pool.is_alive():
        pool = _POOLS[n] = _Pool(n)
    return pool.run(body.__module__, body.__name__, arguments)


class RankError(AssertionError):
    """A body failed on a rank; carries that rank's traceback."""


class _Pool:
    def __init__(self, n: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.began = time.time()
        store = str(Path(self.folder.name) / "store")
        path = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(n):
            ours, theirs = Pipe()
            words = [sys.executable, "-m", "ranks", str(rank), str(n), store, str(theirs.fileno())]
            with theirs:
                self.processes.append(
                    subprocess.Popen(
                        words,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                    )
                )
            allow_core_dump(self.processes[-1].pid)
            self.pipes.append(ours)

    def is_alive(self) -> bool:
        return bool(self.processes) and all(p.poll() is None for p in self.processes)

    def run(self, module: str, name: str, arguments: dict[str, Any]) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((module, name, arguments, torch.initial_seed()))
        results: dict[int, Any] = {}
        waiting = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=TIMEOUT_S)
            if not ready:
                self.close()
                raise RankError(f"ranks {sorted(waiting.values())} timed out after {TIMEOUT_S} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    failed, results[rank] = pipe.recv()
                except EOFError:
                    failed, results[rank] = True, "the process died"
                if failed:
                    results[rank] += self._cpp_stacks()
                    self.close()
                    raise RankError(f"rank {rank} failed:\n{results[rank]}")
        return [results[rank] for rank in range(len(self.pipes))]

    def _cpp_stacks(self) -> str:
        """Return the C++ stacks of ranks that crashed: such a crash may not come again."""
        text = ""
        for process in self.processes:
            if process.poll() is not None and process.returncode < 0:
                core = take_core_dump(process.pid, Path.cwd(), self.began)
                if core is not None:
                    text += "\n" + write_stacks(core, Path(self.folder.name) / "stacks")
        return text

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []
        self.folder.cleanup()


_POOLS: dict[int, _Pool] = {}


@atexit.register
def close_pools() -> None:
    """End all ranks; later tests start fresh ones."""
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()


def _serve(rank: int, n: int, store: str, pipe: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch.distributed as dist

    from meshwright.comm.world import World

    faulthandler.enable()
    torch.set_num_threads(1)
    file_store = dist.FileStore(store, n)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=n)
    world = World(rank, n, torch.device("cpu"), file_store)
    while True:
        try:
            module, name, arguments, seed = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(seed)  # of the test, the same on all ranks
            found = getattr(importlib.import_module(module), name)
            result = getattr(found, "body", found)(world, **arguments)
            pipe.send((False, result))
        except BaseException:
            pipe.send((True, traceback.format_exc()))


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Connection(int(sys.argv[4])))
