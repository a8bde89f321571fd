"""Ranks leave their process groups while others wait in them.

A file of its own: the pool of ranks has no groups left afterwards.
"""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.regroup import leave_generation
from meshwright.runtime.ranks.elastic import is_lost
from ranks import on_ranks

WAIT_S = 60.0


def leaving(world, folder):
    """Ranks 0, 1 and 3 leave with their groups still referred to; rank 2 waits in a ring.

    As after the end of rank 0: its neighbours see it, and rank 2 is none of them. Returns whether
    rank 2 was freed while the others' processes ran on.
    """
    group, freed = dist.new_group(backend="gloo"), Path(folder) / "freed"
    dist.barrier(group=group)  # all are connected
    if world.rank != 2:
        leave_generation()
        until = time.monotonic() + WAIT_S
        while not freed.exists() and time.monotonic() < until:
            time.sleep(0.02)
        assert group is not None
        return freed.exists()
    gathered = [torch.zeros(1) for _ in range(world.size)]
    with pytest.raises(RuntimeError) as error:
        dist.all_gather(gathered, torch.ones(1), group=group)
    assert is_lost(error.value)
    freed.touch()
    leave_generation()
    return True


def test_whoever_leaves_frees_peers_that_are_no_neighbours_of_the_lost_rank(tmp_path):
    assert on_ranks(4, leaving, folder=str(tmp_path)) == [True] * 4
