"""Records of ranks that crash or hang: core dumps with C++ stacks, and NCCL's flight record.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from meshwright.training.run_folder import RunFolder

_PATTERN: Final = Path("/proc/sys/kernel/core_pattern")
_APPENDS_PID: Final = Path("/proc/sys/kernel/core_uses_pid")
# A larger dump is cut off by the kernel. CPU ranks of tests and laptops have less memory.
LARGEST: Final = 8 << 30
_READ_S: Final = 120.0
# Frames of a crash that messages show.
FRAMES: Final = 25
# elf(5): where a file's header has its type, and the type of core dumps.
_ELF_TYPE: Final = 16
_ET_CORE: Final = 4


def allow_core_dump(pid: int) -> None:
    """Let a running process of this user leave a core dump of up to `LARGEST` bytes.

    Does nothing if the system does not allow it, or if the process has ended.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_CORE)
        soft = LARGEST if hard == resource.RLIM_INFINITY else min(LARGEST, hard)
        resource.prlimit(pid, resource.RLIMIT_CORE, (soft, hard))


def core_dump(pid: int, folder: Path, since: float) -> Path | None:
    """Return the core dump that a process with this working folder left, no older than `since`.

    `since` is in seconds since 1970. None if there is none, or if the system pipes dumps to a
    program such as systemd-coredump.
    """
    if not _PATTERN.is_file():
        return None
    pattern = _PATTERN.read_text().strip()
    if not pattern or pattern.startswith("|"):
        return None
    if "%p" not in pattern and _APPENDS_PID.read_text().strip() != "0":
        pattern += ".%p"
    name = pattern.replace("%p", str(pid)).replace("%P", str(pid))
    while (index := name.find("%")) >= 0:  # the name of the program, the signal, the time, ...
        name = f"{name[:index]}*{name[index + 2 :]}"
    path = folder / name  # an absolute pattern stays as it is
    dumps = [file for file in path.parent.glob(path.name) if _is_dump(file, since)]
    return max(dumps, key=lambda file: file.stat().st_mtime, default=None)


def _is_dump(file: Path, since: float) -> bool:
    """Return whether a file is an ELF core dump newer than `since`, not any file named "core"."""
    if not file.is_file() or file.stat().st_mtime < since:
        return False
    with file.open("rb") as content:
        head = content.read(_ELF_TYPE + 2)
    kind = head[_ELF_TYPE:]
    return head.startswith(b"\x7fELF") and _ET_CORE in (
        int.from_bytes(kind, "little"),
        int.from_bytes(kind, "big"),
    )


def take_core_dump(pid: int, folder: Path, since: float) -> Path | None:
    """Return the path of a process's core dump, renamed if its name lacks the process id.

    Arguments and None are as in `core_dump`.
    """
    core = core_dump(pid, folder, since)
    if core is None or str(pid) in core.name:
        return core
    return core.rename(core.with_name(f"{core.name}.{pid}"))


def write_stacks(core: Path, file: Path) -> str:
    """Write the C++ stacks of all threads in a core dump to a file, and return them as text.

    The crashed thread comes first. Removes the dump. Takes seconds. Without gdb, the dump remains
    and the text says so.
    """
    try:
        stacks = _stacks_of(core)
        with contextlib.suppress(OSError):  # a full disk, or a folder that is gone
            file.write_text(f"{stacks}\n", encoding="utf-8")
        return stacks
    finally:
        if shutil.which("gdb") is not None:
            core.unlink(missing_ok=True)


def _stacks_of(core: Path) -> str:
    gdb = shutil.which("gdb")
    if gdb is None:
        return f"gdb is not installed; it shows the C++ stacks in {core}"
    command = [
        gdb,
        "-batch",
        "-nx",
        "-ex",
        "set pagination off",
        "-ex",
        "set print frame-arguments none",
    ]
    command += ["-ex", "backtrace", "-ex", "thread apply all backtrace", sys.executable, str(core)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_READ_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"gdb took more than {_READ_S:.0f} s to read {core}"
    return done.stdout.strip() or f"gdb cannot read {core}: {done.stderr.strip()}"


def crash_stack(stacks: str) -> list[str]:
    """Return the first stack frames of the crashed thread, given the text of `write_stacks`."""
    first, _, _ = stacks.partition("\nThread ")
    frames = [line for line in first.splitlines() if line.startswith("#")]
    return list(dict.fromkeys(frames))[:FRAMES] or stacks.splitlines()[:1]


# Where a rank writes and what it reads from; its number and, for a pipe, ".pipe" follow. The first
# name of a file is that of torch 2.11 and later.
_FILES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPES: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_LOOK_S: Final = 0.1


def trace_files(folder: RunFolder, environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make NCCL's flight record go to the run folder.

    Empty if the user has set them.
    """
    if any(name in environ for name in _FILES):
        return {}
    return dict.fromkeys(_FILES, str(folder.nccl_trace))


@contextlib.contextmanager
def traced(environ: Mapping[str, str], folder: RunFolder) -> Iterator[dict[str, str]]:
    """Yield the environment in which ranks on GPUs write NCCL's flight record on request.

    The pipes for requests are in a temporary folder on a local disk: if torch cannot create one, as
    on some network file systems, the rank ends.
    """
    files = trace_files(folder, environ)
    if _PIPES in environ:
        yield files
        return
    with tempfile.TemporaryDirectory(prefix="meshwright-", ignore_cleanup_errors=True) as pipes:
        yield {**files, _PIPES: f"{pipes}/rank-"}


def ask_for_traces(
    environ: Mapping[str, str],
    ranks: Sequence[int],
    wait_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Path]:
    """Make ranks write NCCL's flight record, and return the files that were written.

    `environ` is that of `traced`. Waits at most `wait_s`: a rank that holds the GIL, which torch
    needs for stacks, writes none, nor does one without a communicator.
    """
    prefix = next((environ[name] for name in _FILES if name in environ), None)
    if prefix is None or _PIPES not in environ:
        return []
    for rank in ranks:  # left by an earlier hang
        Path(f"{prefix}{rank}").unlink(missing_ok=True)
    asked = [rank for rank in ranks if _write(Path(f"{environ[_PIPES]}{rank}.pipe"))]
    sizes: dict[Path, int] = {}
    until = clock() + wait_s
    while asked and clock() < until:
        time.sleep(_LOOK_S)
        before, sizes = sizes, _sizes(Path(f"{prefix}{rank}") for rank in asked)
        if len(sizes) == len(asked) and sizes == before:  # all are there, and no longer grow
            break
    return sorted(sizes)


def _write(pipe: Path) -> bool:
    """Write a byte to a named pipe; returns whether a process reads it."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(descriptor, "wb", buffering=0) as file, contextlib.suppress(OSError):
        return bool(file.write(b"1"))
    return False


def _sizes(paths: Iterator[Path]) -> dict[Path, int]:
    """Return the sizes in bytes of the files that exist and are not empty."""
    sizes = {path: path.stat().st_size for path in paths if path.is_file()}
    return {path: size for path, size in sizes.items() if size}
