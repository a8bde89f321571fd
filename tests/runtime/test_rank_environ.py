"""What ranks are started with: threads, and an allocator that keeps what it has."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.layout import Layout, Machine
from meshwright.prove.case import Case
from meshwright.runtime import session
from meshwright.runtime.measure import benchmark
from meshwright.runtime.proofs import proof
from meshwright.runtime.ranks.local import ALLOCATOR, rank_environ
from meshwright.spec.loading import load_config

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Allocates 64 MiB in blocks of 4, frees them, and does so again: faults of the second time.
FAULTS = """
import resource, torch
def once():
    kept = [torch.ones(1 << 20) for _ in range(16)]
once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_threads_and_allocator_beside_what_was_there():
    found = rank_environ({"A": "b"}, 3)
    assert found == {
        "A": "b",
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
        "GLIBC_TUNABLES": ALLOCATOR,
    }
    mixed = rank_environ({"GLIBC_TUNABLES": "glibc.cpu.x86_shstk=on"})
    assert mixed["GLIBC_TUNABLES"] == f"glibc.cpu.x86_shstk=on:{ALLOCATOR}"


def test_ranks_on_gpus_have_what_the_user_has_not_set():
    found = rank_environ({"PYTORCH_ALLOC_CONF": "backend:native"}, 4, on_gpus=True)
    assert found["PYTORCH_ALLOC_CONF"] == "backend:native"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in found
    assert found["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in found  # of which torch 2.11 warns in each rank
    assert found["TORCHINDUCTOR_COMPILE_THREADS"] == "4"
    bare = rank_environ({}, on_gpus=True)
    assert bare["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert not set(bare) & set(rank_environ({})) & {"TORCH_FR_BUFFER_SIZE"}


class Joined(Exception):
    """The ranks would meet now."""


def test_a_rank_that_others_have_started_has_it_before_torch_reads_it(monkeypatch):
    """By torchrun, Slurm, Ray or a manifest: all of them start `meshwright train` as a rank."""
    gpus = Machine("cuda", 2, 8, "CUDA GPU", is_fixed=True)
    at = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environ = {**at, "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCH_FR_BUFFER_SIZE": "9"}
    seen = {}

    def join(*_):
        seen.update(os.environ)
        raise Joined

    monkeypatch.setattr(session, "detect", lambda *_: gpus)
    monkeypatch.setattr(session, "settled", lambda config, _: config)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr("meshwright.comm.world.join", join)
    monkeypatch.setattr("meshwright.runtime.ranks.worker.follow_parent", lambda _: None)
    monkeypatch.setattr("meshwright.runtime.ranks.worker.StopRequest.listen", lambda _: None)
    with pytest.raises(Joined):
        session.train(load_config(None, ["layout.dp_replicate=2"]), environ)
    seen.pop("TORCHINDUCTOR_CACHE_DIR", None)  # set by torch, where its compiler is imported now
    assert seen == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",  # the buffer was asked for otherwise
    }


def test_ranks_of_proofs_and_measurements_on_gpus_have_it(monkeypatch):
    started = []

    def ranks(command, world, folder, environ, *_, **__):
        started.append((command, environ.get("TORCH_FR_BUFFER_SIZE")))
        raise Joined

    config = load_config(None, [])
    case = Case(config.model, config.train, Layout())
    for room in (proof, benchmark):
        monkeypatch.setattr(room, "LocalRanks", ranks)
    for device, size in (("cpu", None), ("cuda", "2000")):
        with pytest.raises(Joined):
            proof.prove_cases([case], {}, print, device=device)
        with pytest.raises(Joined):
            benchmark.measure_on_ranks({"device": device}, 1, {}, print)
        assert [found for _, found in started[-2:]] == [size, size]
        assert started[-2][0][-1] == device


@pytest.mark.parametrize(
    "environ", [{"GLIBC_TUNABLES": "glibc.malloc.check=1"}, {"LD_PRELOAD": "libtcmalloc.so"}]
)
def test_an_allocator_of_ones_own_stays(environ):
    found = rank_environ(environ)
    assert {key: found.get(key) for key in environ} == environ
    assert found.get("GLIBC_TUNABLES") == environ.get("GLIBC_TUNABLES")


def test_below_a_limit_memory_goes_back():
    assert "GLIBC_TUNABLES" not in rank_environ({}, keeps_memory=False)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of the GNU C library")
def test_what_was_freed_is_used_again():
    def faults(environ):
        done = subprocess.run(
            [sys.executable, "-c", FAULTS], capture_output=True, text=True, env=environ, check=True
        )
        return int(done.stdout)

    plain = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    given_back = plain | {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}
    assert faults(given_back) > 1000
    assert faults(rank_environ(plain)) < 100
