"""Frozen weights in NF4: where matmuls, memory and the source of weights meet them."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.models.nf4 import NF4Linear, pairs
from meshwright.program.lower import Program


def keep_in_nf4(model: nn.Module, program: Program) -> None:
    """Have linear layers on the meta device keep their weights as the program says, in NF4."""
    for path, module in model.named_modules():
        sharding = program.shardings.get(f"{path}.weight")
        if not isinstance(module, nn.Linear) or sharding is None or not sharding.part.is_nf4:
            continue
        packed = torch.empty(sharding.stored_shape, dtype=torch.uint8, device="meta")
        module.weight = nn.Parameter(packed, requires_grad=False)
        if type(module) is nn.Linear:  # else it is one with an adapter, or of tensor parallelism
            module.__class__ = NF4Linear


def give_levels(model: nn.Module, device: torch.device) -> None:
    """Give all layers with weights in NF4 one table of the numbers that their bytes stand for."""
    packed = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    packed = [layer for layer in packed if layer.weight.dtype == torch.uint8]
    if packed:
        table = pairs(device)
        for layer in packed:
            layer.levels = table  # no buffer: a checkpoint has no use for it
