"""Memory is counted only once gloo's threads have let go of what they have carried."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.comm.gloo_threads import wait_for_gloo_threads
from ranks import ranks

MESSAGES = 50


def made_slow():
    """Let gloo's threads of this process run last, on the one core that it has."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for path in Path("/proc/self/task").glob("*/comm"):
        if path.read_text().strip() == "pt_gloo_runloop":
            thread = int(path.parent.name)
            os.sched_setaffinity(thread, os.sched_getaffinity(0))
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


@ranks(2)
def test_what_gloo_has_carried_is_free_once_its_threads_sleep(world):
    made_slow()
    kept = 0
    for _ in range(MESSAGES):
        sent, received = torch.ones(64), torch.empty(64)
        storages = [StorageWeakRef(x.untyped_storage()) for x in (sent, received)]
        dist.all_to_all_single(received, sent, async_op=True).wait()
        assert wait_for_gloo_threads(longest_s=60.0)
        del sent, received
        kept += sum(not one.expired() for one in storages)
    assert kept == 0


def task(folder, thread, name, state):
    (folder / str(thread)).mkdir()
    (folder / str(thread) / "stat").write_text(f"{thread} ({name}) {state} 1 1 1 0 -1")


@pytest.mark.parametrize(
    ("states", "sleeps"), [("", True), ("SS", True), ("SR", False), ("DS", False)]
)
def test_only_threads_of_gloo_are_waited_for(tmp_path, states, sleeps):
    task(tmp_path, 1, "python", "R")
    task(tmp_path, 2, "a) pt_gloo_runloop", "R")
    for place, state in enumerate(states):
        task(tmp_path, 10 + place, "pt_gloo_runloop", state)
    (tmp_path / "99").mkdir()  # has ended
    assert wait_for_gloo_threads(tmp_path, longest_s=0.01) is sleeps
