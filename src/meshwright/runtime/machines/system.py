"""A machine's properties besides devices: links, shared memory, the disk, the clock, limits.

Includes quick measurements. Does not import torch: `bench device` measures collectives.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from meshwright.units import GIB, MIB, format_bytes

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """The result of one check; state "bad" prevents a run, a "note" does not."""

    name: str
    text: str
    state: State = "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


_FEW_FILES: Final = 1024
_SENT: Final = 256 * MIB
_WRITTEN: Final = 64 * MIB
_PIECE: Final = MIB
# NCCL's ranks of a node pass messages through it; containers often have 64 MiB.
_SHARED: Final = Path("/dev/shm")
_LITTLE_SHARED: Final = GIB
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_INFINIBAND: Final = Path("/sys/class/infiniband")
_UNSYNCHRONISED: Final = 5  # TIME_ERROR of adjtimex(2)


def examine_system(folder: Path) -> Iterator[Finding]:
    """Yield findings on driver, limits, shared memory, clock, loopback and the folder's disk."""
    yield _driver()
    yield from _limits()
    yield _shared_memory()
    yield _clock()
    yield _loopback()
    yield _disk(folder)


def _driver() -> Finding:
    if not _DRIVER.is_file():
        return Finding("driver", "no NVIDIA driver")
    match = re.search(r"Kernel Module.*?(\d+\.\d+[\d.]*)", _DRIVER.read_text(errors="replace"))
    return Finding("driver", f"NVIDIA {match[1]}" if match else "NVIDIA, of unknown version")


def _limits() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < _FEW_FILES
    hint = ": each rank has a connection to every other in every group; see ulimit -n"
    yield Finding("open files", f"{soft}{hint if few else ''}", "note" if few else "ok")
    if not sys.platform.startswith("linux"):
        return
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and _INFINIBAND.exists():
        text = f"{format_bytes(locked)}; InfiniBand registers more: see ulimit -l"
        yield Finding("locked memory", text, "note")


def _shared_memory() -> Finding:
    if not _SHARED.is_dir():
        return Finding("shared memory", f"there is no {_SHARED}", "note")
    usage = shutil.disk_usage(_SHARED)
    text = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free in {_SHARED}"
    if usage.free < _LITTLE_SHARED:
        text += "; NCCL needs more where GPUs have no direct link: --shm-size of a container"
        return Finding("shared memory", text, "note")
    return Finding("shared memory", text)


def _clock() -> Finding:
    """Return a finding on whether NTP synchronizes the clock.

    Logs of several nodes are compared by time.
    """
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    state = _clock_state()
    if state is None:
        return Finding("clock", text)
    if state == _UNSYNCHRONISED:
        return Finding(
            "clock", f"{text}; not synchronised (NTP): times of nodes may differ", "note"
        )
    return Finding("clock", f"{text}, synchronised")


def _clock_state() -> int | None:
    """Return the clock's state by adjtimex(2), which reads only; None if the system lacks it."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "adjtimex"):
        return None
    state = int(libc.adjtimex(ctypes.create_string_buffer(512)))  # all modes 0: only reads
    return None if state < 0 else state


def _loopback() -> Finding:
    """Return a finding with the measured throughput and latency of TCP on loopback."""
    try:
        rate, turn = loopback_speed()
    except OSError as error:
        return Finding("loopback", f"{error.strerror}", "bad")
    return Finding(
        "loopback",
        f"{rate / 1e9:.1f} GB/s in one stream, {turn * 1e6:.0f} us there and back; "
        "`meshwright bench device` measures collectives",
    )


def loopback_speed() -> tuple[float, float]:
    """Return the bytes/s of a TCP stream on loopback and the round trip of a byte in seconds."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
    ):
        far, _ = server.accept()
        with far:
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _stream(near, far), _turn(near, far)


def _stream(client: socket.socket, server: socket.socket) -> float:
    def read() -> None:
        left, buffer = _SENT, bytearray(_PIECE)
        while left:
            left -= server.recv_into(buffer, min(_PIECE, left))

    reader = threading.Thread(target=read)
    piece = bytes(_PIECE)
    started = time.perf_counter()
    reader.start()
    for _ in range(_SENT // _PIECE):
        client.sendall(piece)
    reader.join()
    return _SENT / (time.perf_counter() - started)


def _turn(client: socket.socket, server: socket.socket, times: int = 200) -> float:
    def echo() -> None:
        for _ in range(times):
            server.sendall(server.recv(1))

    echo_thread = threading.Thread(target=echo)
    echo_thread.start()
    started = time.perf_counter()
    for _ in range(times):
        client.sendall(b"x")
        client.recv(1)
    seconds = (time.perf_counter() - started) / times
    echo_thread.join()
    return seconds


def _disk(folder: Path) -> Finding:
    """Return a finding with the measured write speed of the disk, including fsync."""
    byte_count = min(_WRITTEN, shutil.disk_usage(folder).free // 10 // _PIECE * _PIECE)
    if not byte_count:
        return Finding("disk", f"{folder} is full", "bad")
    piece = os.urandom(_PIECE)  # what a file system that compresses cannot shorten
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            started = time.perf_counter()
            for _ in range(byte_count // _PIECE):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - started
    except OSError as error:
        return Finding("disk", f"{folder}: {error.strerror}", "bad")
    return Finding(
        "disk", f"{byte_count / seconds / 1e6:,.0f} MB/s written and synchronised in {folder}"
    )
