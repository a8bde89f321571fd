"""`LocalRun`: the ranks of a run on this machine, with restarts. Does not import torch."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

from meshwright.comm.generations import ELASTIC, Announcements
from meshwright.program.events import Event, read_event
from meshwright.runtime.ranks.fault import Fault
from meshwright.runtime.supervise.attempts import Stopping, run_attempts
from meshwright.runtime.supervise.crash_records import traced, write_stacks
from meshwright.runtime.supervise.elastic import ElasticSupervisor
from meshwright.runtime.supervise.lock import RunLock
from meshwright.runtime.supervise.supervisor import (
    LocalRanks,
    StopSignals,
    Timing,
    Watchdog,
    listen_on_loopback,
    supervise,
)
from meshwright.runtime.supervise.view import EventTail, Room
from meshwright.training.events import JsonLines, Sink
from meshwright.training.run_folder import Job, restore

# glibc gives blocks from 128 KiB (later more, at most 32 MiB) back to the system as they are freed,
# and gets new ones in pieces of 4 KiB, each of them zeroed as it is touched for the first time: a
# step allocates gigabytes of activations so. Here it keeps them, and asks for pieces of 2 MiB.
# The GNU C Library, section 39.2, Memory Allocation Tunables; other libraries ignore it.
ALLOCATOR: Final = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        f"glibc.malloc.mmap_threshold={1 << 30}",
        f"glibc.malloc.trim_threshold={1 << 30}",
    )
)


# Of a rank with a GPU, each unless the user has set it or another word for it. Memory that grows in
# place leaves no gaps between blocks of other sizes; NCCL's last collectives say what hangs.
_ON_GPUS: Final = (
    (("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True"),
    (("TORCH_FR_BUFFER_SIZE",), "2000"),
)
_COMPILERS: Final = "TORCHINDUCTOR_COMPILE_THREADS"


def rank_environ(
    environ: Mapping[str, str],
    threads: int = 1,
    *,
    keeps_memory: bool = True,
    on_gpus: bool = False,
) -> dict[str, str]:
    """Return the environment variables of ranks with `threads` threads each.

    With `keeps_memory`, glibc is told to keep freed memory for reuse; pass False for ranks with a
    memory limit. Variables that are already set stay.
    """
    variables = {**environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    tunables = environ.get("GLIBC_TUNABLES", "")
    if keeps_memory and sets_allocator(environ):
        variables["GLIBC_TUNABLES"] = f"{tunables}:{ALLOCATOR}" if tunables else ALLOCATOR
    return {**variables, **gpu_environ(environ, threads)} if on_gpus else variables


def gpu_environ(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return additional environment variables for a rank with a GPU."""
    variables: dict[str, str] = {}
    for names, value in _ON_GPUS:
        if not any(name in environ for name in names):
            variables.update(dict.fromkeys(names, value))
    if _COMPILERS not in environ:  # torch's compiler would take all cores on each rank
        variables[_COMPILERS] = str(threads)
    return variables


def sets_allocator(environ: Mapping[str, str]) -> bool:
    """Return whether to tune glibc's allocator for ranks: False if the user configures one."""
    return "glibc.malloc" not in environ.get("GLIBC_TUNABLES", "") and "LD_PRELOAD" not in environ


class LocalRun:
    """Runs the local ranks of a run, restarting them after failures."""

    def __init__(
        self,
        job: Job,
        environ: Mapping[str, str],
        locks: Sequence[RunLock],
        timing: Timing,
        command: list[str],
    ) -> None:
        self._job, self._locks, self._timing, self._command = job, locks, timing, command
        threads = job.machine.threads(job.layout.world)
        is_limited = job.machine.device == "cpu" and job.config.cluster.memory is not None
        on_gpus = job.machine.device == "cuda"
        keeps = not is_limited
        wanted = job.config.log.core_dumps
        # The dump of a GPU's rank has its host memory, which may be hundreds of GiB.
        self._dumps_core = not on_gpus if wanted == "auto" else wanted
        self._readers: list[threading.Thread] = []
        self._environ = rank_environ(environ, threads, keeps_memory=keeps, on_gpus=on_gpus)

    def train(self, listener: socket.socket, view: Sink, signals: StopSignals) -> int:
        """Train until the run ends, and return its exit code.

        Ranks of the first attempt meet at `listener`. Also raises what `run_attempts`,
        `Stopping.look` and `RunLock.check` raise.
        """
        job = self._job
        stopping = Stopping(
            job, signals, lambda text: view.write({"event": "stopping", "text": text})
        )
        tail = EventTail(job.folder.events, only_new=job.resume, read=read_event)
        room = Room(job.folder.path)
        events = JsonLines(job.folder.events)  # one for all: a full disk may keep some waiting

        def look(watchdog: Watchdog) -> None:
            for lock in self._locks:
                lock.check()
            events.catch_up()
            if (slow := watchdog.slow()) is not None:
                events.write(slow)
            for event in (*tail.new(), *room.new()):
                view.write(event)
            stopping.look()

        def attempt(number: int) -> int:
            if number:
                restore(job)
            meet = listener if number == 0 else listen_on_loopback(job.config.cluster.port)
            cluster = job.config.cluster
            if cluster.elastic:
                return self._elastic(number, meet, look, lambda: signals.asked, events.write)
            watchdog = Watchdog(job.folder, job.layout.world, cluster.hang, hang_of=cluster.hang_of)
            with self._traces() as traces, self._ranks(number, meet, traces) as ranks:
                return supervise(
                    ranks, lambda: look(watchdog), self._timing, lambda: signals.asked, watchdog
                )

        try:
            return run_attempts(job, attempt, lambda: signals.asked, events.write)
        finally:
            events.close()
            view.close()
            for reader in self._readers:
                reader.join()

    def _elastic(
        self,
        attempt: int,
        meet: socket.socket,
        look: Callable[[Watchdog], None],
        stop: Callable[[], bool],
        tell: Callable[[Event], None],
    ) -> int:
        """Run an attempt in which only the replica of a failed rank restarts."""
        with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
            announced = Announcements(Path(folder))
            with self._ranks(attempt, meet, {ELASTIC: folder}) as ranks:
                supervisor = ElasticSupervisor(self._job, ranks, announced, self._timing, tell)
                return supervisor.watch(look, stop)

    def _read_later(self, core: Path, file: Path) -> str:
        """Start a thread that reads a core dump, which takes seconds, and return a note on it."""
        self._readers.append(threading.Thread(target=write_stacks, args=(core, file)))
        self._readers[-1].start()
        return f"The C++ stacks of its threads will be in {file}"

    def _traces(self) -> AbstractContextManager[dict[str, str]]:
        """Return a context with the environment variables for NCCL's flight record on GPUs."""
        on_gpus = self._job.machine.device == "cuda"
        return traced(self._environ, self._job.folder) if on_gpus else nullcontext({})

    def _ranks(
        self, attempt: int, meet: socket.socket, extra_environ: Mapping[str, str]
    ) -> LocalRanks:
        environ = {**self._environ, **extra_environ, "MESHWRIGHT_ATTEMPT": str(attempt)}
        fault = environ.get("FAULT")
        is_once = fault is not None and not Fault.parse(fault).always
        return LocalRanks(
            self._command,
            self._job.layout.world,
            self._job.folder,
            environ,
            meet,
            self._timing,
            [lock.descriptor for lock in self._locks],
            read_core=self._read_later if self._dumps_core else None,
            environ_again={k: v for k, v in environ.items() if k != "FAULT" or not is_once},
        )
