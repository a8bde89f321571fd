"""Processes forked from one that has imported torch, in place of processes started anew.

Importing torch and meshwright takes 2.3 s of a core. The tests start some 500 Python processes, so
that those seconds were half of their time. Here a server, one for each pytest process, has imported
what ranks and commands use, and forks a process for each that a test starts; that takes 10 ms.

- `Forks.popen` is `subprocess.Popen` except for the start: `_execute_child` sends the command line,
  environment, folder and open files to the server over a socket. Pipes, `wait`, `kill`, exit codes
  and signals are those of the standard library. `conftest.py` puts it in place of
  `subprocess.Popen`, so `LocalRanks` inside pytest starts its ranks so, too.
- The server forks twice, and the process between ends at once. pytest is a "child subreaper"
  (prctl(2)): it becomes the parent of what is left, and can wait for it as for its own child.
- The server has one thread, no process group and no gradient was ever computed in it; it asserts
  before each fork that the system knows of one thread. A fork is safe then.
- The new process takes the environment, folder, open files, session, signal handlers, `sys.argv`,
  `sys.path`, `sys.stdout` and number of threads that it would have been born with. It shows the
  command line in /proc, too. `python -m NAME` is run by `runpy`, as Python itself does.
- A process that was forked so forks its own ranks by itself, while it has one thread: `meshwright
  train` as a command is a supervisor that never computes.

What is started anew nevertheless, by `subprocess.Popen` as it was:
- everything in a test marked `faults` or `execs`: there the start itself, the process's memory, or
  what it imports is what is tested;
- every command but those of `FORKED`. A test that wants `python -c CODE` or a script forked, too,
  says `with forks.all_python():`;
- what has another value of a variable that is read as libraries are loaded (`READ_AT_LOAD`);
- everything where this is not Linux, or where MESHWRIGHT_TESTS_EXEC=1 is set, as CI does once.

Forked ranks share one seed of Python's string hashes. Ranks that iterate over a set of strings in
different orders are thus seen only by those tests that start processes anew.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from meshwright.runtime.ranks.local import ALLOCATOR

FORKED: Final = {
    "meshwright",
    "meshwright.runtime.ranks.worker",
    "meshwright.runtime.proofs.proof_worker",
    "meshwright.runtime.measure.bench_worker",
    *("benchmarks.gpu_ranks", "benchmarks.gpu_ranks_worker"),
    "ranks",
    "torch.distributed.run",  # its own ranks are started anew: it has threads
}
# Imported by the server: what ranks, commands and tests on ranks would import themselves.
PRELOADED: Final = (
    *("torch", "torch._dynamo", "torch.profiler", "safetensors.torch"),
    *("pytest", "hypothesis", "transformers", "meshwright.simulate.dry_run"),
    *("meshwright.runtime.ranks.worker", "meshwright.runtime.proofs.proof_worker"),
    *("meshwright.runtime.measure.bench_worker", "meshwright.runtime.session"),
    "meshwright.cli.train",
)
# Variables that the C library, torch and Python read once, as they are loaded.
READ_AT_LOAD: Final = (
    *("GLIBC_", "LD_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_"),
    *("DNNL_", "ATEN_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "CUDA_", "NCCL_", "PYTHON"),
    "HF_",  # as huggingface_hub is imported
)
# Among these, those that the new process takes on by itself.
TAKEN_ON: Final = {"OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
PR_SET_CHILD_SUBREAPER: Final = 36  # of Linux's prctl.h
COMMAND_LINE_BYTES: Final = 1 << 15  # kept free for the command lines that /proc shows
MOST_BYTES: Final = 1 << 16  # of a request

Start = Callable[[Mapping[str, Any], Sequence[int]], int | None]


def read_at_load(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have their effect only on a process that is started anew."""
    found = {
        name: value
        for name, value in environ.items()
        if name.startswith(READ_AT_LOAD) and name not in TAKEN_ON
    }
    # How ranks keep their memory does not change what they compute.
    return {name: value for name, value in found.items() if value != ALLOCATOR}


class Forks:
    """Where `popen` finds the server; `is_on` switches it, for a test."""

    def __init__(self, start: Start) -> None:
        self.start, self.is_on, self._all_python = start, True, False
        self.popen = type("Popen", (_Popen,), {"forks": self})

    @contextlib.contextmanager
    def all_python(self) -> Iterator[None]:
        """Fork every Python process that is started meanwhile, whatever it runs."""
        self._all_python = True
        try:
            yield
        finally:
            self._all_python = False

    def wants(self, words: Sequence[str]) -> bool:
        """Return whether a command is one to fork."""
        if not self.is_on or len(words) < 3 or words[0] != sys.executable:
            return False
        if self._all_python:
            return words[1] in ("-c", "-m") or words[1].endswith(".py")
        return words[1] == "-m" and words[2] in FORKED


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process as `subprocess.Popen` starts it, forked where it can be."""

    forks: Forks

    def _execute_child(self, *given: Any) -> None:
        names = (
            *("args", "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env"),
            *("startupinfo", "creationflags", "shell", "stdin", "_", "_", "stdout", "_", "stderr"),
            *("restore_signals", "gid", "gids", "uid", "umask", "new_session", "group"),
        )
        asked = dict(zip(names, given, strict=True))
        pid = self._fork(asked)
        if pid is None:
            super()._execute_child(*given)
            return
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*given[10:16])

    def _fork(self, asked: Mapping[str, Any]) -> int | None:
        words = asked["args"]
        if isinstance(words, str | bytes | os.PathLike) or not self.forks.wants(list(words)):
            return None
        is_plain = all(asked[key] is None for key in ("executable", "preexec_fn", "gid", "uid"))
        if not is_plain or asked["shell"] or asked["umask"] >= 0 or not asked["close_fds"]:
            return None
        files = {n: asked[name] for n, name in enumerate(("stdin", "stdout", "stderr"))}
        files = {n: n if file == -1 else file for n, file in files.items()}
        files |= {number: number for number in asked["pass_fds"]}
        request = {
            "argv": [os.fspath(word) for word in words],
            "environ": dict(os.environ if asked["env"] is None else asked["env"]),
            "folder": str(Path(asked["cwd"] or ".").absolute()),
            "files": list(files),
            "new_session": asked["new_session"],
            "group": asked["group"],
        }
        return self.forks.start(request, list(files.values()))


class Server:
    """The process that forks, one for each set of variables that are read at load."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError("this system does not let pytest adopt processes")
        self._links: dict[str, tuple[socket.socket, subprocess.Popen[bytes]]] = {}
        self._lock = threading.Lock()

    def start(self, request: Mapping[str, Any], files: Sequence[int]) -> int | None:
        """Have a process forked, and return its id; None where it has to be started anew."""
        text = json.dumps(request).encode()
        if len(text) > MOST_BYTES:
            return None
        read = read_at_load(request["environ"])
        with self._lock:
            key = json.dumps(read, sort_keys=True)
            if key not in self._links:
                if self._links:  # one server is worth its memory, a second one is not
                    return None
                self._links[key] = self._begin(read)
            link, _ = self._links[key]
            socket.send_fds(link, [text], list(files))
            answer = link.recv(64)
        if not answer:
            raise RuntimeError("the server of tests/forking.py has ended: see its traceback above")
        return int(answer)

    def _begin(self, read: Mapping[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        room = "x" * COMMAND_LINE_BYTES
        words = [sys.executable, __file__, str(theirs.fileno()), room]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environ = {k: v for k, v in os.environ.items() if k not in read_at_load(os.environ)}
        environ |= one_thread | dict(read) | {"GLIBC_TUNABLES": ALLOCATOR}
        with theirs:
            process = _REAL_POPEN(
                words, env=environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        return ours, process

    def close(self) -> None:
        """End the servers; what they have forked goes on."""
        for link, process in self._links.values():
            link.close()
            process.wait()


_REAL_POPEN: Final = subprocess.Popen


def serve(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request, until the link closes; returns a request, in the process forked."""
    while True:
        text, files, _, _ = socket.recv_fds(link, MOST_BYTES, 253)
        if not text:
            os._exit(0)
        assert len(os.listdir("/proc/self/task")) == 1, threading.enumerate()
        told, tells = os.pipe()
        waits, goes = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(tells, str(pid).encode())
                os._exit(0)
            for end in (told, tells, goes):
                os.close(end)
            os.read(waits, 1)  # ends when pytest is the parent
            os.close(waits)
            link.close()
            return json.loads(text), files
        for end in (tells, waits, *files):
            os.close(end)
        os.waitpid(between, 0)
        os.close(goes)
        link.send(os.read(told, 64))
        os.close(told)


def fork_here(request: Mapping[str, Any], files: Sequence[int]) -> int | None:
    """Fork this process, as a supervisor that was forked itself; None where it has threads."""
    same = read_at_load(request["environ"]) == read_at_load(os.environ)
    if not same or len(os.listdir("/proc/self/task")) > 1:
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        atexit._clear()  # what the supervisor has to do at its end
        become(request, files)
    return pid


def become(request: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Make this process what the request asks for, run it, and end."""
    code = 1
    try:
        _take_on(request, files)
        code = _outcome(lambda: _run(request["argv"]))
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python's end does
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _take_on(request: Mapping[str, Any], files: Sequence[int]) -> None:
    if request["new_session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    _place(request["files"], files)
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not None:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python does
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.environ.clear()
    os.environ.update(request["environ"])
    time.tzset()
    os.chdir(request["folder"])
    _show_command_line(request["argv"])
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _stream(1, is_unbuffered)
    sys.stderr = sys.__stderr__ = _stream(2, True, errors="backslashreplace")
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads else len(os.sched_getaffinity(0)))
    subprocess.Popen = Forks(fork_here).popen  # type: ignore[misc]


def _place(numbers: Sequence[int], files: Sequence[int]) -> None:
    """Give open files their numbers, and close all others."""
    above = max(numbers) + 1
    kept = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for number, file in zip(numbers, kept, strict=True):
        os.dup2(file, number)
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in numbers:
            with contextlib.suppress(OSError):
                os.close(int(entry))


def _stream(number: int, is_unbuffered: bool, errors: str = "strict") -> io.TextIOWrapper:
    raw = open(number, "wb", closefd=False)  # noqa: SIM115
    is_by_line = is_unbuffered or os.isatty(number)
    return io.TextIOWrapper(
        raw, errors=errors, line_buffering=is_by_line, write_through=is_unbuffered
    )


def _show_command_line(words: Sequence[str]) -> None:
    """Have /proc show a command line: in the place of the server's own, which has room for it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


def _run(words: Sequence[str]) -> None:
    """Run `python WORDS[1:]` in this process."""
    sys.orig_argv = list(words)
    _, kind, *rest = words
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, inherited), *_OWN_PATH]
    if kind == "-m":
        name, *sys.argv[1:] = rest
        sys.path.insert(0, os.getcwd())
        sys.argv[0] = name
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # run as __main__, and imported as itself where others do
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, *sys.argv[1:] = rest
        sys.path.insert(0, "")
        sys.argv[0] = "-c"
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [kind, *rest]
        sys.path.insert(0, str(Path(kind).parent.resolve()))
        runpy.run_path(kind, run_name="__main__")


def _outcome(work: Callable[[], None]) -> int:
    """Return the exit code that Python would end with, negative for a signal."""
    try:
        work()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


_OWN_PATH: Final = [
    entry
    for entry in sys.path[1:]
    if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
]


def main() -> None:
    """Be the server: `python forking.py SOCKET ROOM`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    _show_command_line([sys.executable, *sys.argv[:2]])  # without the room
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that a collection in a process does not copy every page
    become(*serve(link))


if __name__ == "__main__":
    main()
