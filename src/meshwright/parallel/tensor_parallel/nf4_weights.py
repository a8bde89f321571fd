"""NF4 weights in linear layers: replaces weights by packed bytes, and sets their level tables."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.models.nf4 import NF4Linear, pairs
from meshwright.program.lower import Program


def keep_in_nf4(model: nn.Module, program: Program) -> None:
    """Replace linear weights on the meta device by packed NF4 ones, where the program says so."""
    for path, module in model.named_modules():
        sharding = program.shardings.get(f"{path}.weight")
        if not isinstance(module, nn.Linear) or sharding is None or not sharding.part.is_nf4:
            continue
        packed = torch.empty(sharding.stored_shape, dtype=torch.uint8, device="meta")
        module.weight = nn.Parameter(packed, requires_grad=False)
        if type(module) is nn.Linear:  # else it is one with an adapter, or of tensor parallelism
            module.__class__ = NF4Linear


def give_levels(model: nn.Module, device: torch.device) -> None:
    """Set one shared dequantisation table, from `models.nf4.pairs`, on all layers with NF4
    weights.
    """
    packed = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    packed = [layer for layer in packed if layer.weight.dtype == torch.uint8]
    if packed:
        table = pairs(device)
        for layer in packed:
            layer.levels = table  # no buffer: a checkpoint has no use for it
