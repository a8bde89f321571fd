"""A world of this process alone, on one device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.comm.world import World


@contextmanager
def world_of_one(device: torch.device) -> Iterator[World]:
    """Join a world of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield World(0, 1, device, store)
        finally:
            dist.destroy_process_group()
