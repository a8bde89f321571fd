"""The process of one training rank: `python -m meshwright.runtime.ranks.worker RUN_FOLDER`.

It joins the other ranks, trains, and leaves either an exit code or a file with its exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import meshwright
from meshwright import torch_private
from meshwright.checkpoint.commit import MANIFEST
from meshwright.comm.collective_recorder import CollectiveRecorder
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.groups import open_groups
from meshwright.comm.rendezvous import Rendezvous
from meshwright.comm.world import World, exchange, join, leave
from meshwright.data import Dataset, StreamedDataset, open_data
from meshwright.data.view import sampled_digest
from meshwright.errors import (
    EXIT_DONE,
    EXIT_RANK_FAILED,
    EXIT_STOPPED,
    ConfigError,
    DataError,
    MeshwrightError,
    RankFailed,
)
from meshwright.files import sha256_bytes, write_atomic
from meshwright.program.events import Event
from meshwright.runtime.pricing.correcting import correcting
from meshwright.runtime.ranks.fault import Fault
from meshwright.runtime.supervise.explain import REFUSED, out_of_memory, ranks_text
from meshwright.runtime.supervise.supervisor import stop_signals
from meshwright.spec import hub
from meshwright.spec.stored import find_step
from meshwright.training.events import Sink, open_sinks
from meshwright.training.loop import train
from meshwright.training.run_folder import Job, RunFolder, read_job
from meshwright.training.sinks.base import TrackedRun
from meshwright.units import format_bytes

_SHOWN: Final = 3  # of the files that differ
_DIGITS: Final = 12  # of a digest, or more where these are the same

Digests = Mapping[str, str]  # by the name of the input


def refuse_unlike(own_digests: Digests, world: World) -> None:
    """Raise `ConfigError` on every rank if the digests of their inputs differ.

    The message names the inputs and ranks. All ranks must call this; if they agree, they exchange
    only 64 bytes.
    """
    if world.size == 1:
        return
    text = json.dumps(own_digests, sort_keys=True)
    if len(set(exchange(sha256_bytes(text.encode()), dist.group.WORLD))) == 1:
        return
    everyone = [json.loads(answer) for answer in exchange(text, dist.group.WORLD)]
    differing = list(differences(everyone))
    suffix = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    hint = "All ranks must read the same files, and run the same code"
    raise ConfigError(f"ranks differ: {'; '.join(differing[:_SHOWN])}{suffix}. {hint}")


def differences(everyone: Sequence[Digests]) -> Iterator[str]:
    """Yield a sentence for each input whose digest differs between ranks, with the values."""
    for name in dict.fromkeys(name for digests in everyone for name in digests):
        ranks: dict[str, list[int]] = {}
        for rank, digests in enumerate(everyone):
            ranks.setdefault(digests.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            digits = _telling(ranks)
            which = (
                f"{value[:digits]} on {ranks_text(ranks_of_value)}"
                for value, ranks_of_value in ranks.items()
            )
            yield f"{name} is {', '.join(which)}"


def _telling(values: Collection[str]) -> int:
    """Return how many leading characters tell all values apart, at least `_DIGITS`."""
    return next(n for n in count(_DIGITS) if len({value[:n] for value in values}) == len(values))


def digests_of(
    job: Job, dataset: Dataset | StreamedDataset, *, has_weights: bool
) -> dict[str, str]:
    """Return digests of a rank's config, data, initial weights and code, by name.

    Without `has_weights`, initial weights are left out.
    """
    files = (job.folder.config, job.folder.plan)
    digests = {str(path): sha256_bytes(path.read_bytes()) for path in files}
    digests |= dataset.files or dataset.identity
    digests["the tokenizer"] = dataset.identity["tokenizer"]
    init_from = job.config.model.init_from
    # An id of the Hub has a commit, whose files never change.
    if has_weights and init_from is not None and hub.hub_id(init_from) is None:
        digests |= dict(_weights(Path(init_from)))
    return digests | dict(_code())


def _weights(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, digest) for a saved step's manifest or the files of a Hugging Face folder."""
    step = find_step(folder)
    paths = [*folder.glob("*.json"), *folder.glob("*.safetensors")]
    for path in sorted(paths) if step is None else [step / MANIFEST]:
        yield str(path), sampled_digest(path)


def _code() -> Iterator[tuple[str, str]]:
    """Yield (name, digest) for this package's files, and the version of torch."""
    root = Path(meshwright.__file__).parent
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".toml"):
            yield str(path.relative_to(root.parent)), sha256_bytes(path.read_bytes())
    yield "torch", str(torch.__version__)


class Injector:
    """Executes a fault once per step; a flight recorder calls it at each phase."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._acted: set[int] = set()

    def __call__(self, phase: str, step: int) -> None:
        """Execute the fault if it is for this phase and step."""
        fault = self._fault
        if phase != fault.phase or fault.step not in (None, step) or step in self._acted:
            return
        self._acted.add(step)
        _DEEDS[fault.action](fault.argument)


def injector(text: str | None, rank: int, attempt: int) -> Injector | None:
    """Return the fault injector for this rank and attempt, or None; `text` is `FAULT`."""
    fault = Fault.parse(text) if text else None
    if fault is None or fault.rank != rank or (attempt > 0 and not fault.always):
        return None
    return Injector(fault)


def _send(number: signal.Signals) -> Callable[[str], None]:
    return lambda argument: os.kill(os.getpid(), number)


def _segfault(argument: str) -> None:
    ctypes.string_at(0)


def _hang_with_gil(argument: str) -> None:
    """Hang while holding the GIL, like a C extension that never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    ctypes.PyDLL(None).pause()


def _raise(argument: str) -> None:
    raise RuntimeError(argument or "a fault on purpose")


def _spoil(argument: str) -> None:
    """Multiply the output of the next module by `argument`, by default NaN."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return None
        handle.remove()
        return out * float(argument or "nan")

    handle = nn.modules.module.register_module_forward_hook(hook)


_DEEDS: Final[Mapping[str, Callable[[str], None]]] = {
    "kill": _send(signal.SIGKILL),
    "stop": _send(signal.SIGSTOP),
    "segfault": _segfault,
    "hang_gil": _hang_with_gil,
    "sleep": lambda argument: time.sleep(float(argument or 1)),
    "raise": _raise,
    "exit": lambda argument: os._exit(int(argument or 7)),
    "nan": _spoil,
}


M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h
PR_SET_PDEATHSIG: Final = 1  # of Linux's prctl.h
# What C++ says where a thread finds no room for its stack.
NO_THREAD: Final = "Resource temporarily unavailable"


class StopRequest:
    """Whether this process was asked to stop by SIGTERM, SIGINT or SIGHUP."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """Install the signal handlers.

        Meshwright's supervisor sends SIGTERM; torchrun passes on the signal that it received.
        """
        for number in stop_signals():
            signal.signal(number, self._ask)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True


def follow_parent(environ: Mapping[str, str]) -> None:
    """End this process as soon as its supervisor has ended, for whatever reason.

    The supervisor holds the other end of a pipe; reading it returns only when that end closes. That
    needs a thread that can run Python; on Linux, the system also kills a process in which none can.
    """
    descriptor = environ.get("MESHWRIGHT_PARENT_FD")
    if descriptor is None:
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait() -> None:
        os.read(int(descriptor), 1)
        os._exit(EXIT_RANK_FAILED)

    threading.Thread(target=wait, daemon=True, name="follow-parent").start()


def tell_stacks() -> None:
    """Install handlers that print the stacks of all threads on SIGUSR1 and in a crash.

    They are in C, so they work while a thread holds the GIL and never releases it.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


class MemoryLimit:
    """A context manager that limits how much more memory a rank may allocate, by RLIMIT_DATA.

    A refused allocation raises `RankFailed`; `ConfigError` if the system has no such limit.
    """

    def __init__(self, job: Job, rank: int, device: torch.device) -> None:
        self.job, self.rank, self.device = job, rank, device
        self.limit = job.config.cluster.memory

    def __enter__(self) -> None:
        if self.limit is None:
            return
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / total), self.device)
            return
        if not sys.platform.startswith("linux"):
            raise ConfigError(
                f"cluster.memory = {format_bytes(self.limit)} cannot be enforced on "
                f"{sys.platform}: leave it out"
            )
        # RLIMIT_DATA counts private writable memory: what tensors are made of. RLIMIT_AS would
        # also count libtorch's file and the 64 MiB that malloc reserves for each thread, and
        # RLIMIT_RSS is not enforced. What the process needs for itself, some 300 MiB, is no more
        # part of the limit than CUDA's own memory is of a GPU's: it is made here, or kept small.
        torch_private.missing("dynamo")  # imports it, as building a model would
        torch.ones(1 << 20).sum()  # starts the threads of the products
        tune_libc()
        _set_data_limit(private_memory() + self.limit)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.limit is None:
            return
        if self.device.type != "cuda":  # what follows needs memory, too
            _set_data_limit(None)
        if error is not None and (is_out_of_memory(error) or NO_THREAD in str(error)):
            message = out_of_memory(self.job.folder, self.rank, self.limit, str(error))
            raise RankFailed(message) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that an allocation failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in REFUSED)


def private_memory() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts, including malloc's free memory."""
    match = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def _set_data_limit(limit: int | None) -> None:
    """Set the soft RLIMIT_DATA, the limit of private writable memory; None: the hard limit.

    The hard limit stays, so that the soft one can be raised again.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    unlimited = hard == resource.RLIM_INFINITY
    soft = hard if limit is None else limit if unlimited else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def tune_libc() -> None:
    """Make freed memory return to the system at once, and thread stacks reserve 1 MiB, not 8.

    By default, glibc keeps freed pieces of up to 32 MiB, and gaps between them are lost: a rank of
    examples/long_context.toml needs 543 MiB instead of 455. Gloo starts up to three threads per
    process group. C libraries without these functions are left alone.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    if hasattr(libc, "pthread_setattr_default_np"):
        attributes = ctypes.create_string_buffer(64)  # 56 bytes on x86-64, 64 on ARM
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 20))
        libc.pthread_setattr_default_np(attributes)


def run_rank(
    job: Job,
    world: World,
    attempt: int,
    stop: StopRequest,
    environ: Mapping[str, str],
    *,
    view: Sink | None = None,
) -> int:
    """Train as one rank of a run, and return the exit code.

    An `attempt` above 0 resumes the run of the previous attempt. `view` is where rank 0 shows the
    run if there is no supervisor.
    """
    config = job.config
    world.recorder.phase("load")
    dataset = open_data(config.data, job.cache, vocab_size=config.model.vocab_size)
    resume = attempt > 0 or job.resume
    refuse_unlike(digests_of(job, dataset, has_weights=not resume), world)
    sinks = sinks_of(job, environ) if world.rank == 0 else []
    sinks += [] if view is None else [view]

    def emit(event: Event) -> None:
        for sink in sinks:
            sink.write(event)

    go = train
    if config.train.engine == "deepspeed":
        go = importlib.import_module("meshwright.training.by_deepspeed").train  # of an extra
    if config.cluster.memory is not None:  # the groups' threads are not part of it
        open_groups(job.layout, world, config.cluster.timeout)
    recorded = CollectiveRecorder(world.recorder, world.device)
    with recorded, MemoryLimit(job, world.rank, world.device):
        summary = go(job, world, dataset, emit, lambda: stop.asked, resume)
    for sink in sinks:
        sink.close()
    world.barrier()  # some launchers end all ranks when the first one has ended
    leave()
    return EXIT_STOPPED if summary.stopped else EXIT_DONE


def sinks_of(job: Job, environ: Mapping[str, str]) -> list[Sink]:
    """Open what the first rank writes the events of a run to."""
    config = job.config
    tracked = TrackedRun(job.folder.path, job.run, config.model_dump(mode="json"))
    return [*open_sinks(config.log, tracked), *correcting(job, environ)]


def open_flight_recorder(
    folder: RunFolder, rendezvous: Rendezvous, environ: Mapping[str, str]
) -> FlightRecorder:
    """Create the flight recorder of this rank, with an injected fault if `FAULT` names one."""
    path = folder.flight_recorder(rendezvous.rank)
    fault = injector(environ.get("FAULT"), rendezvous.rank, rendezvous.attempt)
    return FlightRecorder.open(path, rendezvous.rank, rendezvous.size, rendezvous.attempt, fault)


def record_failure(
    folder: RunFolder, rank: int, error: BaseException, recorder: FlightRecorder | None = None
) -> None:
    """Write the exception that ended this rank to a file for the supervisor."""
    causes = [error, error.__cause__]
    failure = {
        "rank": rank,
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "expected": isinstance(error, MeshwrightError),
        "exit_code": getattr(error, "exit_code", EXIT_RANK_FAILED),
        "out_of_memory": any(is_out_of_memory(e) for e in causes if e is not None),
        "place": "" if recorder is None else recorder.place,
        "traceback": "".join(traceback.format_exception(error)),
    }
    with contextlib.suppress(DataError):  # a full disk: what the process prints has to do
        write_atomic(folder.failure(rank), json.dumps(failure).encode())


def main() -> None:
    """Run one training rank of the run folder named on the command line."""
    environ = os.environ
    stop = StopRequest()
    stop.listen()
    follow_parent(environ)
    tell_stacks()
    folder = RunFolder(Path(sys.argv[1]))
    rank = int(environ.get("RANK", "0"))
    recorder: FlightRecorder | None = None
    try:
        job = read_job(folder.path)
        rendezvous = Rendezvous.from_environment(environ)
        if rendezvous is None:
            raise ConfigError("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set")
        recorder = open_flight_recorder(folder, rendezvous, environ)
        torch.set_num_threads(job.machine.threads(job.layout.world))
        if job.config.cluster.elastic:
            # Only here: that module imports this one.
            from meshwright.runtime.ranks.elastic import run_elastic_rank

            code = run_elastic_rank(job, rendezvous, recorder, stop, environ)
        else:
            world = join(rendezvous, job.machine.device, job.config.cluster.timeout, recorder)
            code = run_rank(job, world, rendezvous.attempt, stop, environ)
    except BaseException as error:
        record_failure(folder, rank, error, recorder)
        code = EXIT_RANK_FAILED
        with contextlib.suppress(OSError):  # the log may be on a disk that is full
            traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Threads of a broken process group can block a normal exit.
    os._exit(code)


if __name__ == "__main__":
    main()
