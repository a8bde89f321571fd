"""The soak of proofs, and the allocator that guards each allocation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from benchmarks.soak import __main__ as soak
from benchmarks.soak.__main__ import cases_of, environ_of, main

from meshwright.prove.outcome import Outcome
from meshwright.prove.verdict import Verdict
from meshwright.runtime.proofs.proof import CLAIM

# The guard begins with gloo's first event loop.
PROGRAM = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.epoll_create(1)
pointers = [libc.malloc(100) for _ in range(8)]
for pointer in pointers:
    ctypes.memset(pointer, 1, 100)
{fault}
for pointer in pointers:
    libc.free(pointer)
"""


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    if not sys.platform.startswith("linux") or shutil.which("cc") is None:
        pytest.skip("the guard needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    words = ("cc", "-shared", "-fPIC", "-o", str(library), str(soak.GUARD), "-ldl")
    subprocess.run(words, check=True)
    return library


@pytest.mark.execs
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""),
        ("ctypes.memset(pointers[1] + 4096, 1, 1)", "access outside of a live allocation"),
        ("ctypes.memset(pointers[1] + 100, 1, 1)", "write beside an allocation"),
        ("libc.free(pointers[2]); ctypes.memset(pointers[2], 1, 1)", "that was freed"),
        ("libc.free(pointers[2])", "free of what is not a live allocation"),
    ],
)
def test_the_guard_sees_wrong_accesses(guard, fault, said):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(fault=fault)],
        env={**os.environ, "LD_PRELOAD": str(guard)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "guard: on" in done.stderr
    assert said in done.stderr
    assert (done.returncode < 0) == bool(said)


def test_checks_have_their_environments(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "allow_mappings", lambda: None)
    monkeypatch.setattr(soak.subprocess, "run", lambda words, check: None)
    assert "LD_PRELOAD" not in environ_of("plain", tmp_path, {})
    assert "check=3" in environ_of("glibc", tmp_path, {})["GLIBC_TUNABLES"]
    assert environ_of("guard", tmp_path, {})["LD_PRELOAD"] == str(tmp_path / "guard.so")


def test_layouts_of_a_soak_have_two_ranks_and_differ():
    first, second = cases_of(1), cases_of(2)
    assert first == cases_of(1) != second
    assert {case.layout.world for case in first} == {2}
    assert all(case.refused is None for case in first)


def test_a_crash_is_counted_and_shown(monkeypatch, capsys):
    def crash(cases, environ, show, seconds):
        layout = cases[0].layout.model_dump(mode="json")
        verdict = Verdict(CLAIM, layout, "every rank ends", "killed by SIGSEGV", None, passed=False)
        show(Outcome(cases[0], (verdict,), 0.0))

    times = iter((0.0, 0.0, 70.0, 70.0))
    monkeypatch.setattr(soak.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(soak, "prove_cases", crash)
    assert main(["--minutes", "1", "--checks", "plain"]) == 1
    table, said = capsys.readouterr()
    assert "| plain | 1 | 1 | 1 |" in table
    assert "killed by SIGSEGV" in said
