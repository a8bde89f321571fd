"""The rank's shards as the optimizer sees them: plain tensors, on the device or on the host."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.comm.groups import Groups
from meshwright.layout import Layout
from meshwright.parallel.data_parallel.gradients import GatheredParameter
from meshwright.parallel.data_parallel.matrices import WholeMatrices
from meshwright.spec.parts import Part


class Shards:
    """Plain tensors for the optimizer, which share this rank's shards or mirror them on the host.

    The optimizer never sees a DTensor: most updates are elementwise, so they need only shards, and
    plain tensors of different meshes can share one fused call. For other updates, `matrices`
    gathers. With offload (ZeRO-Offload, arXiv:2101.06840, section 4), the mirrors and the optimizer
    states stay on the host; each step copies gradients to it and updated weights back.
    """

    def __init__(self, params: list[GatheredParameter], *, on_host: bool) -> None:
        self.held, self.on_host = params, on_host
        self.leaves = [nn.Parameter(self._copy(h.shard)) for h in params]
        for leaf in self.leaves:
            leaf.grad_dtype = None  # bf16 weights may have sums in fp32

    @property
    def parts(self) -> list[Part]:
        """The description (name, whole shape, axes) of each leaf's parameter."""
        return [h.sharding.part for h in self.held]

    def matrices(self, groups: Groups, device: torch.device, layout: Layout) -> WholeMatrices:
        """Return the object that gathers whole matrices from these shards."""
        return WholeMatrices(self.leaves, self.held, groups, device, layout)

    def _copy(self, shard: Tensor) -> Tensor:
        if not self.on_host:
            return shard
        mirror = torch.empty_like(shard, device="cpu", pin_memory=shard.is_cuda)
        return mirror.copy_(shard)

    @torch.no_grad()
    def take(self) -> None:
        """Set the leaves' gradients to this step's gradients, copied to the host with offload."""
        for param, leaf in zip(self.held, self.leaves, strict=True):
            gradient = param.gradient
            if not self.on_host:
                leaf.data = param.shard  # FSDP2 pads a shard anew at its first forward
                leaf.grad = gradient
            else:
                leaf.grad = None if gradient is None else _on_way(gradient)
        if self.on_host and any(param.shard.is_cuda for param in self.held):
            torch.cuda.current_stream().synchronize()  # once, for all that is on its way

    @torch.no_grad()
    def give(self) -> None:
        """Copy updated weights from the host back to the parameters, with offload."""
        if self.on_host:
            for param, leaf in zip(self.held, self.leaves, strict=True):
                param.shard.copy_(leaf, non_blocking=True)

    def clear(self) -> None:
        """Release all gradients."""
        for param, leaf in zip(self.held, self.leaves, strict=True):
            param.parameter.grad = leaf.grad = None


def _on_way(gradient: Tensor) -> Tensor:
    """Start to copy a gradient to the host; a GPU's arrives when the current stream has
    reached it.
    """
    if not gradient.is_cuda:
        return gradient
    pinned = torch.empty_like(gradient, device="cpu", pin_memory=True)
    return pinned.copy_(gradient, non_blocking=True)
