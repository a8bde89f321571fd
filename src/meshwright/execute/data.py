"""Data parallelism on FSDP2: which modules are wrapped, and how gradients are summed."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from meshwright.spec.training import Precision

PRECISIONS = {
    "fp32": MixedPrecisionPolicy(),
    # Master weights, gradients and the optimizer stay fp32; products are bf16.
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def replicate_data(model: nn.Module, mesh: DeviceMesh, precision: Precision) -> None:
    """Replicate the model over a one-dimensional mesh, block by block.

    Gradients are summed, not averaged: the loss is already divided by the global number of target
    tokens, which stays right for uneven batches.
    """
    policy = PRECISIONS[precision]
    for block in model.layers.values():  # type: ignore[operator]
        replicate(block, mesh=mesh, mp_policy=policy)
    replicate(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A divide factor needs PREMUL_SUM, which gloo lacks.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def set_last_microbatch(model: nn.Module, is_last: bool) -> None:
    """Say whether the next backward is the last one before the update.

    The last one reduces the gradients and drops the compute copies of the weights; those before it
    accumulate locally and keep the copies, which are the same for the next microbatch.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)


def reshard(model: nn.Module) -> None:
    """Put the master weights back after a forward that no backward follows.

    FSDP2 does it in the backward; without one, `named_parameters` would go on to give the compute
    copies, which are bf16 under mixed precision and have no gradients.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
