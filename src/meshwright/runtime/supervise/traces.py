"""NCCL's own record of its last collectives, written by hanging ranks on GPUs. No torch here.

ProcessGroupNCCL keeps a ring of collectives, with their stacks. One of its threads, which needs no
Python, checks a named pipe once per second, and then writes the ring into a file:
torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, `DumpPipe`. It also does so at a timeout.
`torchfrtrace` reads the files.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from meshwright.training.run_folder import RunFolder

# Where a rank writes and what it reads from; its number and, for a pipe, ".pipe" follow. The first
# name of a file is that of torch 2.11 and later.
_FILES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPES: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_LOOK_S: Final = 0.1


def trace_files(folder: RunFolder, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put traces into a run's folder, unless the user sets them."""
    if any(name in environ for name in _FILES):
        return {}
    return dict.fromkeys(_FILES, str(folder.nccl_trace))


@contextlib.contextmanager
def traced(environ: Mapping[str, str], folder: RunFolder) -> Iterator[dict[str, str]]:
    """Yield the environment in which ranks on GPUs write traces when they are asked to.

    The pipes are in a separate folder on a local disk: if torch cannot create one, as on some
    network file systems, it ends the rank.
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
    """Make ranks with such an environment write traces; return the written files.

    Waits at most `wait_s` for them: a rank that holds the GIL, which torch needs for stacks, writes
    none, nor does one that has no communicator yet.
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
    """Write into a pipe; returns whether somebody reads it."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(descriptor, "wb", buffering=0) as file, contextlib.suppress(OSError):
        return bool(file.write(b"1"))
    return False


def _sizes(paths: Iterator[Path]) -> dict[Path, int]:
    """Return the bytes of those files that have any."""
    sizes = {path: path.stat().st_size for path in paths if path.is_file()}
    return {path: size for path, size in sizes.items() if size}
