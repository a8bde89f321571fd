"""The one ordered function that turns specs and a layout into the parallel model of this rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.execute.data import replicate_data
from meshwright.execute.world import World, device_mesh
from meshwright.layout import Layout
from meshwright.models import build_model, init_parameter
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import Precision

# name and shape to the full tensor
Source = Callable[[str, torch.Size], torch.Tensor]


def build(
    spec: ModelSpec,
    layout: Layout,
    world: World,
    precision: Precision,
    seq_len: int,
    source: Source,
    *,
    compiled: bool = False,
) -> nn.Module:
    """Return this rank's part of the model, with weights from `source`.

    Order: describe on the meta device, compile blocks, replicate over data, materialise, fill.
    Each parameter is made in full from its name and then sharded, so every mesh starts from the
    same weights.
    """
    model = build_model(spec, device="meta", max_seq_len=seq_len)
    if compiled:
        for block in model.layers.values():
            block.compile()
    mesh = device_mesh(layout.mesh, world.device)
    if world.size > 1 or precision != "fp32":
        replicate_data(model, mesh["dp_replicate"], precision)
    model.to_empty(device=world.device)
    model.init_tables(world.device)
    fill(model, source)
    return model


def seeded(spec: ModelSpec, seed: int) -> Source:
    """Return the source of freshly initialised weights."""
    return lambda name, shape: init_parameter(name, tuple(shape), spec, seed)


@torch.no_grad()
def fill(model: nn.Module, source: Source) -> None:
    """Copy the full tensors of `source` into the parameters, each rank keeping its shard."""
    for name, parameter in model.named_parameters():
        full = source(name, parameter.shape).to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            sharded = distribute_tensor(
                full, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            parameter.to_local().copy_(sharded.to_local())
        else:
            parameter.copy_(full)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be sharded; a collective when it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
