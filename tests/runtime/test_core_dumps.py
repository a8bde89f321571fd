"""Core dumps of crashed processes, read for their C++ stacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.runtime.supervise import crash_records
from meshwright.runtime.supervise.crash_records import (
    allow_core_dump,
    core_dump,
    crash_stack,
    take_core_dump,
    write_stacks,
)

READS_NULL = "import ctypes; ctypes.string_at(0)"
# The sizes of freed chunks are overwritten; glibc notices while it holds a lock of its allocator.
CORRUPTS_HEAP = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
chunks = [libc.malloc(100) for _ in range(40)]
for chunk in chunks:
    libc.free(chunk)
for chunk in chunks[10:30]:
    ctypes.memset(chunk - 8, 0x41, 8)
for _ in range(1000):
    libc.malloc(3000)
"""


def crash(code: str, folder: Path) -> Path:
    """Run code that crashes in a folder, and return the core dump."""
    if not sys.platform.startswith("linux") or shutil.which("gdb") is None:
        pytest.skip("reading a core dump needs Linux and gdb")
    if crash_records._PATTERN.read_text().startswith("|"):
        pytest.skip("this system pipes core dumps to a program")
    began = time.time() - 1  # the clock of files may be a little behind
    words = [sys.executable, "-c", f"input()\nimport faulthandler\nfaulthandler.enable()\n{code}"]
    with subprocess.Popen(
        words, cwd=folder, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        allow_core_dump(process.pid)
        process.communicate(b"\n")
    assert process.returncode < 0
    core = take_core_dump(process.pid, folder, began)
    assert core is not None
    return core


@pytest.mark.execs
@pytest.mark.parametrize(
    ("code", "frame"), [(READS_NULL, "strlen"), (CORRUPTS_HEAP, "malloc_printerr")]
)
def test_the_stacks_of_a_crash_are_kept(tmp_path, code, frame):
    """Frames of the C library: a distribution's Python has no names of its own functions."""
    core = crash(code, tmp_path)
    stacks = write_stacks(core, tmp_path / "stacks")
    assert frame in "\n".join(crash_stack(stacks))
    assert (tmp_path / "stacks").read_text().strip() == stacks
    assert not core.exists()


def test_a_file_of_the_user_is_no_core_dump(tmp_path, monkeypatch):
    monkeypatch.setattr(crash_records, "_PATTERN", tmp_path / "pattern")
    monkeypatch.setattr(crash_records, "_APPENDS_PID", tmp_path / "appends")
    (tmp_path / "pattern").write_text("core\n")
    (tmp_path / "appends").write_text("0\n")
    file = tmp_path / "core"
    file.write_text("the core of the matter")
    assert core_dump(7, tmp_path, 0.0) is None
    dump = b"\x7fELF" + bytes(12) + b"\x04\x00"
    file.write_bytes(dump)
    assert core_dump(7, tmp_path, time.time() + 60) is None  # of an earlier crash
    assert core_dump(7, tmp_path, 0.0) == file
    assert take_core_dump(7, tmp_path, 0.0) == tmp_path / "core.7"


@pytest.mark.parametrize(
    ("pattern", "appends", "name"),
    [
        ("core", "1", "core.7"),
        ("core.%e.%p", "1", "core.python.7"),
        ("%h-%t-%p.dump", "0", "host-12345-7.dump"),
    ],
)
def test_names_of_core_dumps(tmp_path, monkeypatch, pattern, appends, name):
    monkeypatch.setattr(crash_records, "_PATTERN", tmp_path / "pattern")
    monkeypatch.setattr(crash_records, "_APPENDS_PID", tmp_path / "appends")
    (tmp_path / "pattern").write_text(pattern)
    (tmp_path / "appends").write_text(appends)
    (tmp_path / name).write_bytes(b"\x7fELF" + bytes(12) + b"\x04\x00")
    assert core_dump(7, tmp_path, 0.0) == tmp_path / name
    (tmp_path / "pattern").write_text("|/usr/lib/systemd/systemd-coredump %P")
    assert core_dump(7, tmp_path, 0.0) is None


def test_the_stack_of_the_crash_comes_first():
    text = "[New LWP 7]\n#0  a () at b.c:1\n#0  a () at b.c:1\n#1  c ()\n\nThread 2:\n#0  other ()"
    assert crash_stack(text) == ["#0  a () at b.c:1", "#1  c ()"]
    assert crash_stack("gdb is not installed") == ["gdb is not installed"]


@pytest.mark.faults
def test_a_rank_that_crashes_leaves_its_stacks(go, tmp_path, capsys):
    crash(READS_NULL, tmp_path)  # skips where it leaves no dump
    folder, _, _ = go("1:update:4:segfault", "log.core_dumps=true")
    assert "string_at" in (folder / "logs" / "rank-1.stacks").read_text()
    main(["doctor", str(folder)])
    assert "string_at" in capsys.readouterr().out
    folder, _, _ = go("1:update:4:segfault", "log.core_dumps=false", name="without")
    assert not (folder / "logs" / "rank-1.stacks").exists()
