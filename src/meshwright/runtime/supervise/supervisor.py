"""The supervisor of local ranks: starts them, watches them, ends all if one fails."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, NamedTuple

from meshwright.comm.flight_recorder_file import FlightRecorderFile, RankPace, forget
from meshwright.comm.secret import VARIABLE
from meshwright.errors import (
    EXIT_DONE,
    EXIT_RANK_FAILED,
    EXIT_REFUSED,
    EXIT_STOPPED,
    ConfigError,
    Diverged,
    MeshwrightError,
    RankFailed,
    refusal,
)
from meshwright.files import is_full, open_own
from meshwright.runtime.supervise.crash_records import (
    allow_core_dump,
    ask_for_traces,
    take_core_dump,
)
from meshwright.runtime.supervise.explain import (
    REFUSED,
    TIMED_OUT,
    explain,
    lost_a_peer,
    memory_words,
    mismatch,
    missing_ranks,
    out_of_memory,
    raised,
    ranks_text,
    read_failure,
    witnesses,
)
from meshwright.training.run_folder import RunFolder, read_job
from meshwright.units import format_seconds

# A signal that comes sooner after another says the same: of a key that is held down, of a shell
# and a job's supervisor that both pass one on.
_APART_S: Final = 0.5


def stop_signals() -> list[signal.Signals]:
    """Return the signals that request a stop; without SIGHUP if it is ignored, as under nohup."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


class StopSignals:
    """A context manager that handles SIGINT, SIGTERM and SIGHUP as requests to stop.

    `asked` is whether there was one; `repeats` counts further Ctrl-Cs.
    """

    def __init__(self) -> None:
        self.asked, self.repeats = False, 0
        self._last = 0.0

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._ask) for number in stop_signals()}
        return self

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        clock_s = time.monotonic()
        is_apart, self._last = clock_s - self._last >= _APART_S, clock_s
        if self.asked and is_apart and signum == signal.SIGINT:
            self.repeats += 1
        self.asked = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


# Steps over which the waits of ranks are compared.
WINDOW: Final = 8
# Until all ranks have begun, they are given at least these seconds: they import torch.
BEGIN_S: Final = 120.0
# The share of those steps that all others wait, at least, where one rank is said to be slow.
_WAITED_FOR: Final = 0.5


class Hang(NamedTuple):
    """A hang of the ranks: its explanation, and for how many seconds they have been silent.

    `missing` are the ranks that the others wait for, if the flight recorders say so.
    """

    cause: str
    silent_s: float
    missing: tuple[int, ...] = ()


class Watchdog:
    """Detects hangs and slow ranks of one attempt from the flight recorders.

    Ranks hang that have been silent for `hang_s` seconds, or those that `hang_of` has for the part
    of the run that they are in (`setup`, `step`, `save`, `eval`), of several parts the longest; 0:
    never. `clock` is that of the recorders, in seconds. If only some `ranks` of the world train,
    these are watched.
    """

    def __init__(
        self,
        folder: RunFolder,
        world: int,
        hang_s: float,
        clock: Callable[[], float] = time.monotonic,
        ranks: Sequence[int] | None = None,
        hang_of: Mapping[str, float] | None = None,
    ) -> None:
        self._folder, self._world, self._hang_s = folder, world, hang_s
        self._hang_of = hang_of or {}
        self._ranks = range(world) if ranks is None else ranks
        self._clock = clock
        self._files: dict[int, FlightRecorderFile] = {}
        self._moves = [0] * len(self._ranks)
        self._moved_at = clock()
        self._before: list[RankPace] | None = None

    def look(self, pids: Sequence[int]) -> Hang | None:
        """Read the flight recorders; returns the hang if there is one, else None."""
        self._map()
        moves = [self._files[r].moves if r in self._files else 0 for r in self._ranks]
        clock_s = self._clock()
        if moves != self._moves:
            self._moves, self._moved_at = moves, clock_s
        silent = clock_s - self._moved_at
        if silent < self._limit_s():
            return None
        everyone = witnesses(self._folder, self._world, pids)
        seen = [everyone[rank] for rank in self._ranks]
        explanation = explain(seen, clock_s)
        return Hang(
            f"no rank has done anything for {format_seconds(silent)}: {explanation}",
            silent,
            missing_ranks(seen),
        )

    def _limit_s(self) -> float:
        """Return after how many silent seconds the ranks hang."""
        has_begun = len(self._files) == len(self._ranks)
        parts = {file.part for file in self._files.values()} if has_begun else {"setup"}
        limits = [self._hang_of.get(part, self._hang_s) for part in parts]
        if 0 in limits:
            return math.inf
        return max(*limits, 0 if has_begun else BEGIN_S)

    def _map(self) -> None:
        for rank in self._ranks:
            if rank not in self._files and (path := self._folder.flight_recorder(rank)).is_file():
                try:
                    self._files[rank] = FlightRecorderFile(path)
                except (OSError, ValueError):  # being written
                    continue

    def slow(self) -> dict[str, Any] | None:
        """Return an event if all other ranks waited for one rank in the last steps, else None."""
        if len(self._files) < len(self._ranks) or len(self._ranks) < 2:
            return None
        paces = [self._files[rank].pace() for rank in self._ranks]
        if min(pace.step for pace in paces) < 2:  # the first one begins when all have loaded
            return None
        if self._before is None:
            self._before = paces
        before = self._before
        if min(p.step for p in paces) - min(p.step for p in before) < WINDOW:
            return None
        self._before = paces
        return _slow_event(before, paces, self._ranks)


def _slow_event(
    before: Sequence[RankPace], latest: Sequence[RankPace], ranks: Sequence[int]
) -> dict[str, Any] | None:
    shares = []
    for old, new in zip(before, latest, strict=True):
        seconds = new.stepped_s - old.stepped_s
        shares.append((new.waited_s - old.waited_s) / seconds if seconds > 0 else 0.0)
    place = min(range(len(shares)), key=shares.__getitem__)
    least_wait = min(share for other, share in enumerate(shares) if other != place)
    if least_wait < _WAITED_FOR or shares[place] > least_wait / 2:
        return None
    return {
        "event": "slow_rank",
        "time": time.time(),
        "rank": ranks[place],
        "from_step": before[place].step,
        "step": latest[place].step,
        "others_wait": least_wait,
        "waits": shares[place],
    }


LOOPBACK = "127.0.0.1"
# A process that they end prints the stacks of its threads first.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True)
class Timing:
    """Times in seconds of a supervisor.

    `poll_s` is between looks at the ranks, `settle_s` for other ranks to report after one has
    failed, and `trace_s` for hung ranks to write NCCL's flight record, a request that torch polls
    once a second.
    """

    poll_s: float = 0.1
    settle_s: float = 1.0
    trace_s: float = 5.0


# Reads a core dump into a file, and returns what to say of it.
ReadCore = Callable[[Path, Path], str]

# What a failure is, for who says what to do about it; a rank that the system killed for want of
# memory was "killed", as one that somebody else killed.
FailureKind = Literal["memory", "killed", "hang", "diverged", "other"]


@dataclass(frozen=True)
class RankFailure:
    """How a rank failed: by its recorded exception if there is one, else by signal or exit code.

    `can_retry`: another attempt may succeed (False for refusals). `is_first_hand`: it did not only
    lose its connection to another failed rank. `deed` identifies a failure that would repeat, out
    of memory or an error raised on purpose at some place; it is empty if the cause may be outside.
    """

    rank: int
    cause: str
    traceback: str = ""
    raised_at: float = 0.0
    is_first_hand: bool = True
    can_retry: bool = True
    deed: str = ""
    kind: FailureKind = "other"


class RanksFailed(RankFailed):
    """Ranks failed or hang: `first` is the root cause, `noticed` the time since 1970.

    It happened at most `detect_s` seconds before.
    """

    def __init__(self, text: str, first: RankFailure, noticed: float, detect_s: float) -> None:
        super().__init__(text)
        self.first, self.noticed, self.detect_s = first, noticed, detect_s


def listen_on_loopback(port: int | None) -> socket.socket:
    """Return a socket that listens on loopback only, on a given port or, for None, a free one.

    Raises `ConfigError` with the nearest free ports if the port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port or 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        legal = [f"cluster.port = {free}" for free in _free_ports(port or 0)]
        rule = f"cluster.port = {port} on {LOOPBACK} cannot be listened on: {error.strerror}"
        raise ConfigError(
            refusal(rule, legal=legal, hint="Left out, a free port is taken.")
        ) from None
    return listener


def _free_ports(taken_port: int, count: int = 2) -> list[int]:
    ports = []
    for port in range(taken_port + 1, min(taken_port + 200, 65536)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            if probe.connect_ex((LOOPBACK, port)) != 0:
                with contextlib.suppress(OSError):
                    probe.bind((LOOPBACK, port))
                    ports.append(port)
        if len(ports) == count:
            break
    return ports


class LocalRanks:
    """The rank processes of a run on this machine, as a context manager that ends all of them."""

    def __init__(
        self,
        command: Sequence[str],
        world: int,
        folder: RunFolder,
        environ: Mapping[str, str],
        listener: socket.socket,
        timing: Timing,
        locks: Sequence[int] = (),
        *,
        read_core: ReadCore | None = None,
        environ_again: Mapping[str, str] | None = None,
    ) -> None:
        """Store how to start the ranks; `locks` are file descriptors of locks for them to inherit.

        Ranks that `start_again` starts have the environment `environ_again`, if given.
        If `read_core` is given, a rank that crashes leaves a core dump, and `read_core` writes the
        C++ stacks of its threads to a file beside its log.
        """
        self._command, self._world, self.folder = list(command), world, folder
        self._environ, self._listener, self._timing = dict(environ), listener, timing
        self._environ_again = self._environ if environ_again is None else dict(environ_again)
        self._kept, self._read_core = list(locks), read_core
        self._began = time.time()
        self._port = listener.getsockname()[1]
        # Anyone on this machine reaches loopback; only its own user reads a process's environment.
        self._secret = secrets.token_hex(32)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lifeline: tuple[int, int] | None = None

    def __enter__(self) -> LocalRanks:
        read_end, write_end = os.pipe()
        self._lifeline = (read_end, write_end)
        for rank in range(self._world):
            self._processes.append(self._begun(rank, read_end))
        self._listener.close()
        return self

    def _begun(self, rank: int, lifeline: int) -> subprocess.Popen[bytes]:
        """Start a rank; what an earlier attempt has left says nothing about this one."""
        self.folder.failure(rank).unlink(missing_ok=True)
        forget(self.folder.flight_recorder(rank))
        process = self._start(rank, lifeline)
        if self._read_core is not None:
            allow_core_dump(process.pid)
        return process

    def start_again(self, ranks: Sequence[int]) -> None:
        """End some ranks at once, and start them again."""
        assert self._lifeline is not None
        self.end(ranks)
        self._environ = self._environ_again
        for rank in ranks:
            self._processes[rank] = self._begun(rank, self._lifeline[0])

    def end(self, ranks: Sequence[int]) -> None:
        """End some ranks at once."""
        for rank in ranks:
            process = self._processes[rank]
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for rank in ranks:
            self._processes[rank].wait()

    def _start(self, rank: int, lifeline: int) -> subprocess.Popen[bytes]:
        environ = self._environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world),
            "LOCAL_WORLD_SIZE": str(self._world),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._port),
            "MESHWRIGHT_LOCAL": "1",
            VARIABLE: self._secret,
            "MESHWRIGHT_PARENT_FD": str(lifeline),
        }
        passed = [lifeline, *self._kept]
        if rank == 0 and self._listener.fileno() >= 0:  # else it is closed: they meet elsewhere
            passed.append(self._listener.fileno())
            environ["MESHWRIGHT_LISTEN_FD"] = str(self._listener.fileno())
        log = self.folder.log(rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_own(log, os.O_WRONLY | os.O_APPEND), "ab") as output:
            return subprocess.Popen(
                self._command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=passed,
                start_new_session=True,  # the terminal's Ctrl-C is for the supervisor alone
            )

    def codes(self) -> list[int | None]:
        """Return each rank's exit code, negative for a signal, None while it runs."""
        return [process.poll() for process in self._processes]

    def pids(self) -> list[int]:
        """Return each rank's process id."""
        return [process.pid for process in self._processes]

    def ask_to_stop(self) -> None:
        """Send SIGTERM to every running rank."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()

    def ask_for_stacks(self) -> None:
        """Make every running rank write its Python stacks to its log, by SIGUSR1."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)

    def ask_for_traces(self) -> list[Path]:
        """Make every running rank write NCCL's flight record; returns the files."""
        running = [rank for rank, code in enumerate(self.codes()) if code is None]
        return ask_for_traces(self._environ, running, self._timing.trace_s)

    def failures(self) -> list[RankFailure]:
        """Return how each failed rank ended, the likeliest root cause first.

        A rank that was killed, or raised its own error, comes before those that only lost a peer.
        """
        failures = []
        for rank, code in enumerate(self.codes()):
            if code not in (None, EXIT_DONE, EXIT_STOPPED):
                failure = failure_of(self.folder, rank, int(code or 0))
                failures.append(
                    replace(failure, traceback=failure.traceback + self._cpp(rank, code))
                )
        return sorted(failures, key=lambda f: (not f.is_first_hand, f.raised_at))

    def _cpp(self, rank: int, code: int | None) -> str:
        """Return a text with or about the C++ stacks of a crashed rank; "" if there are none."""
        if self._read_core is None or code is None or -code not in _CRASHES:
            return ""
        core = take_core_dump(self._processes[rank].pid, Path.cwd(), self._began)
        if core is None:
            return ""
        return f"\n{self._read_core(core, self.folder.cpp_stacks(rank))}"

    def __exit__(self, *_: object) -> None:
        # Not asked first: whoever had something to report has had time for it, and a save that is
        # cut short leaves the step before it.
        self.end(range(len(self._processes)))
        if self._lifeline is not None:
            for descriptor in self._lifeline:
                os.close(descriptor)


def failure_of(folder: RunFolder, rank: int, code: int) -> RankFailure:
    """Return a rank's failure, from its recorded exception or else its process's exit code."""
    failure = read_failure(folder, rank)
    if failure is not None:
        is_lost = lost_a_peer(failure)
        return RankFailure(
            rank,
            raised(rank, failure),
            "" if failure["expected"] else failure["traceback"],
            failure["time"],
            is_first_hand=not is_lost,
            can_retry=failure["exit_code"] != EXIT_REFUSED,
            deed="" if is_lost else _deed(failure),
            kind=_kind(failure),
        )
    position = witnesses(folder, rank + 1)[rank].place
    where = f"in {position}" if position.startswith("step") else position
    if code < 0:
        name = signal.Signals(-code).name
        hint = ""
        if name == "SIGKILL":
            hint = f", possibly by the system because memory ran out{memory_words(folder, rank)}"
        log = _tail(folder.log(rank), 60)
        if name == "SIGABRT" and (refused := next((text for text in REFUSED if text in log), "")):
            limit = None
            with contextlib.suppress(MeshwrightError):
                limit = read_job(folder.path).config.cluster.memory
            cause = out_of_memory(folder, rank, limit, refused)
            return RankFailure(rank, cause, log, kind="memory")
        cause = f"rank {rank} was killed by {name}{hint}, {where}"
        # What it was doing as it crashed stands there: see `worker.tell_stacks`.
        stacks = log if -code in _CRASHES else ""
        return RankFailure(rank, cause, stacks, kind="killed")
    cause = f"rank {rank} exited with code {code}, {where}"
    # It has raised, and could not say what: one that was killed comes before it.
    is_mute = code == EXIT_RANK_FAILED
    if is_mute and is_full(folder.path):
        cause += f"; the disk of {folder.path} is full, so that it could not say why"
    return RankFailure(rank, cause, _tail(folder.log(rank)), is_first_hand=not is_mute)


def _kind(failure: Mapping[str, Any]) -> FailureKind:
    """Return the kind of a recorded exception: "memory", "diverged" or "other"."""
    if failure["out_of_memory"]:
        return "memory"
    return "diverged" if failure["type"] == Diverged.__name__ else "other"


def _deed(failure: Mapping[str, Any]) -> str:
    """Return a text that is the same if the failure repeats, as for `RankFailure.deed`.

    It has no rank numbers, since any rank may report a failure that all share.
    """
    if failure["out_of_memory"]:
        return f"{failure['place']}: out of memory"
    same = re.sub(r"\brank \d+", "rank", failure["message"])
    return f"{failure['place']}: {same}" if failure["expected"] else ""


def _tail(log: Path, lines: int = 20) -> str:
    if not log.is_file():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def supervise(
    ranks: LocalRanks,
    on_poll: Callable[[], None],
    timing: Timing,
    stop: Callable[[], bool],
    watchdog: Watchdog | None = None,
) -> int:
    """Watch started ranks until they end, and return the run's exit code.

    `on_poll` is called at every look. When `stop` returns true, the ranks are asked to save and
    end, with no time limit as long as they make progress. Raises `RanksFailed` with the traceback
    of the first failed rank, or with the watchdog's explanation of a hang.
    """
    is_asked = False
    looked_at = time.monotonic()
    while True:
        on_poll()
        codes, clock_s = ranks.codes(), time.monotonic()
        if any(code not in (None, EXIT_DONE, EXIT_STOPPED) for code in codes):
            raise_failure(ranks, timing, clock_s - looked_at)
        if None not in codes:
            on_poll()
            return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_DONE
        looked_at = clock_s
        if not is_asked and stop():
            is_asked = True
            ranks.ask_to_stop()
        hang = None if watchdog is None else watchdog.look(ranks.pids())
        if hang is not None:
            raise_hang(ranks, hang, timing)
        time.sleep(timing.poll_s)


def raise_hang(ranks: LocalRanks, hang: Hang, timing: Timing) -> None:
    """Have the ranks write where they are, then raise `RanksFailed` for a hang."""
    noticed = time.time()
    ranks.ask_for_stacks()
    time.sleep(timing.poll_s)
    cause = hang.cause + _traces_text(ranks.ask_for_traces())
    text = f"{cause}. Where each rank was: {ranks.folder.log(0).parent}/rank-*.log"
    raise RanksFailed(text, RankFailure(-1, cause, kind="hang"), noticed, hang.silent_s)


def _traces_text(traces: Sequence[Path]) -> str:
    """Return a phrase with the command that reads NCCL's flight records, or "" without any."""
    if not traces:
        return ""
    prefix = traces[0].name.rstrip("0123456789")
    command = shlex.join(["torchfrtrace", "--prefix", prefix, str(traces[0].parent)])
    return f"; what NCCL has done last, of {len(traces)} ranks: {command}"


def raise_failure(ranks: LocalRanks, timing: Timing, detect_s: float) -> None:
    """Give the other ranks a moment to report, then raise `RanksFailed` for the first failure."""
    noticed, deadline = time.time(), time.monotonic() + timing.settle_s
    seen = witnesses(ranks.folder, len(ranks.codes()), ranks.pids())
    while None in ranks.codes() and time.monotonic() < deadline:
        time.sleep(0.02)
    failures = ranks.failures()
    first = failures[0]
    # A rank whose collective took too long says nothing of the one that it waited for.
    explanation = explain(seen) if TIMED_OUT.search(first.cause) else mismatch(seen)
    if explanation:
        first = replace(first, cause=f"{first.cause}\n{explanation}")
    text = first.cause
    if first.traceback:
        text += f"\n\n{first.traceback.rstrip()}"
    if len(failures) > 1:
        text += f"\n\n{ranks_text(sorted(f.rank for f in failures[1:]))} failed after it"
    raise RanksFailed(text, first, noticed, detect_s)


def worker_command(folder: RunFolder) -> list[str]:
    """Return the command line of a rank process."""
    return [sys.executable, "-m", "meshwright.runtime.ranks.worker", str(folder.path)]
