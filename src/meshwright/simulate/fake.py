"""A fake world: one rank of many, with tensors without memory and messages without receivers.

Process groups are torch's "fake" backend; tensors are those of `FakeTensorMode`: shapes, dtypes and
storages of the right size without bytes. Everything above them is the training code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.world import World
from meshwright.errors import MeshwrightError
from meshwright.torch_private import (
    FakeStore,
    FakeTensorMode,
    ShardingPropagator,
    TorchDispatchMode,
    disable_current_modes,
    replaced,
)

CPU: Final = torch.device("cpu")


@contextmanager
def fake_world(
    rank: int, size: int, recorder: FlightRecorder, device: torch.device = CPU
) -> Iterator[World]:
    """Return a context in which this process is one rank of a world of `size` ranks; the others
    don't exist.

    Raises `MeshwrightError` in a process that is already a rank.
    """
    if dist.is_initialized():
        raise MeshwrightError("this process is a rank already: a rehearsal needs one of its own")
    store = FakeStore()
    backend = "fake" if device == CPU else f"cpu:fake,{device.type}:fake"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size, device, store, recorder=recorder)
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Return a context in which every tensor is fake; a value that the host reads from one is 1."""
    fake: Any = FakeTensorMode(allow_non_fake_inputs=True)
    answers: Any = _Answers()  # type: ignore[no-untyped-call]
    with (
        replaced(ShardingPropagator, _PROPAGATE, _without_modes),
        # A mesh finds this rank's place in it by reading a tensor.
        replaced(DeviceMesh, "__getitem__", _without_modes),
        _meshes_joined(),
        fake,
        answers,
    ):
        yield


@contextmanager
def _meshes_joined() -> Iterator[None]:
    """Let FSDP2 concatenate device meshes outside of fake mode; torch 2.11 has no such method."""
    join = getattr(DeviceMesh, "_concatenate", None)
    if join is None:
        yield
        return
    with replaced(DeviceMesh, "_concatenate", lambda _: staticmethod(_without_modes(join))):
        yield


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode in which the host reads 1, which is finite, from fake tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, or a replacement for those that fake tensors do not support."""
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten._pin_memory.default:
            return args[0].clone()
        if func is torch.ops.aten.is_pinned.default:
            return True
        if func is torch.ops.c10d.allreduce_coalesced_.default:
            return torch.ops.c10d.allreduce_(*args[:3], None, *args[3:])[1]
        return func(*args, **(kwargs or {}))


# DTensor finds shapes by running operations on tensors of the global shape, which a tracker of
# memory would take for the rank's own.
_PROPAGATE: Final = "_propagate_tensor_meta_non_cached"


def _without_modes(propagate: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with disable_current_modes():
            return propagate(*args, **kwargs)

    return run
