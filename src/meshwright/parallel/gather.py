"""Gathers whole tensors from the shards of a parallel model, on any stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.comm.groups import Link
from meshwright.parallel.apply import Parallel
from meshwright.parallel.data_parallel.gradients import GatheredParameter
from meshwright.program.shards import Sharding


def full_tensor(tensor: Tensor, ep: Link | None = None) -> Tensor:
    """Return the whole of a tensor that may be sharded over tp, data or experts.

    A collective if it is sharded. `ep` is the link over which experts are divided, for tensors of
    experts.
    """
    if isinstance(tensor, DTensor):
        # Shards that are kept on the host meet on the device, where their groups communicate.
        on_device = tensor.to(tensor.device_mesh.device_type)
        assert isinstance(on_device, DTensor)
        tensor = on_device.full_tensor()
    if ep is None or ep.size == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in ep.ranks]
    dist.all_gather(parts, tensor.contiguous(), group=ep.group)
    return torch.cat(parts)


def whole_of(tensor: Tensor, sharding: Sharding, parallel: Parallel) -> Tensor:
    """Return the whole of a tensor that is sharded like a parameter; a collective if sharded."""
    experts = parallel.groups.experts
    return full_tensor(tensor.detach(), experts.ep if experts and sharding.ep > 1 else None)


@torch.no_grad()
def on_stages(
    parallel: Parallel, tensor_of: Callable[[GatheredParameter], Tensor | None]
) -> Iterator[tuple[GatheredParameter, Tensor | None]]:
    """Yield (parameter, whole tensor) for this rank's trained parameters.

    `tensor_of` returns the sharded tensor, or None, which is passed on. A collective of the ranks
    of a stage.
    """
    for param in parallel.trained:
        tensor = tensor_of(param)
        yield param, None if tensor is None else whole_of(tensor, param.sharding, parallel)


@torch.no_grad()
def on_rank_0(
    parallel: Parallel, tensor_of: Callable[[GatheredParameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) in the model's order, without padding, on the host of rank 0.

    A collective: every rank must iterate; the others yield nothing. One tensor is whole at a time.
    """
    by_name = {
        param.name: param for param in reversed(parallel.held)
    }  # the first copy of a tied matrix
    program, pp = parallel.program, parallel.groups.pp
    owners = {
        name: parallel.stage_ranks[stage.index]
        for stage in reversed(program.stages)
        for name in program.parameters(stage)
    }
    coordinates = parallel.groups.at
    # The ranks that talk to rank 0 are those of its own pipeline.
    in_first_column = all(coordinates[axis] == 0 for axis in coordinates if axis != "pp")
    for name, sharding in program.shardings.items():
        owner = owners[name]
        full = None
        if owner == coordinates["pp"]:
            full = whole_of(tensor_of(by_name[name]), sharding, parallel)
            full = full[: sharding.part.real_shape[0]]
        if not in_first_column:
            continue
        if coordinates["pp"] == 0:
            if full is None:
                full = torch.empty(
                    sharding.part.real_shape, dtype=torch.float32, device=parallel.device
                )
                dist.recv(full, pp.ranks[owner], pp.group)
            yield name, full.cpu().contiguous()
        elif full is not None:
            dist.send(full.to(parallel.device, torch.float32).contiguous(), pp.ranks[0], pp.group)
