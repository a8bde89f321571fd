"""FSDP2's all-gathers of weights whose matmuls are in float8: one byte per element, and a scale.

A rank rounds its rows before they are sent, by the largest value of the whole weight. The result is
bit for bit what each rank would compute from gathered rows. torch documents with `fully_shard` the
two functions (`fsdp_pre_all_gather` and `fsdp_post_all_gather`) that it looks for on a shard.
torchao has them, too, on a tensor subclass: the optimizer and checkpoints would meet that subclass,
and it doesn't pad uneven rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.groups import Link
from meshwright.torch_private import foreach_norm

_E4M3: Final = torch.float8_e4m3fn


class Float8Shard:
    """This rank's rows of a linear layer's weight, with FSDP2's hooks to gather them in float8.

    `scale` is that of the whole weight. `dtype` is the compute dtype, to which values are rounded
    first. `products` is torchao's matmul configuration of the layer.
    """

    def __init__(self, rows: Tensor, products: Any, dtype: torch.dtype) -> None:
        self.rows, self._products, self._dtype = rows, products, dtype
        self.scale: Tensor | None = None

    def before(
        self, mesh: Any, size: torch.Size, stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """FSDP2's pre-all-gather hook: return the rows in float8, padded, and the scale."""
        assert self.scale is not None
        # Of one dimension it makes the product fp32, as a scalar would not.
        rounded = (self.rows.to(self._dtype) * self.scale[None]).to(_E4M3)
        missing = -(-size[0] // mesh.size()) - len(rounded)
        if missing:
            padding = torch.zeros(missing, *size[1:], dtype=_E4M3, device=rounded.device)
            rounded = torch.cat([rounded, padding])
        return (rounded,), (self.scale,)

    def after(
        self,
        gathered: Sequence[Tensor],
        scales: tuple[Tensor],
        dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """FSDP2's post-all-gather hook: return the float8 weight and its memory.

        If `out` is given, it uses the gathered memory already, and only its scale is set.
        """
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        (data,), (scale,) = gathered, scales
        if out is not None:
            out._scale = scale
            return None
        role = GemmInputRole.WEIGHT
        weight = Float8TrainingTensor(data, scale, dtype, self._products, gemm_input_role=role)
        return weight, (data,)


class Float8Gathers:
    """All weights of this rank that FSDP2 gathers in float8."""

    def __init__(self, parameters: Iterable[Any], dtype: torch.dtype, link: Link) -> None:
        """Register the gather hooks on those of FSDP2's `parameters` that are float8 layers'
        weights.

        `link` joins the ranks over which rows are sharded.
        """
        from torchao.float8.float8_linear import Float8Linear

        self._dtype, self._link = dtype, link
        self.shards: list[Float8Shard] = []
        for parameter in parameters:
            layer, name = parameter._module_info.module, parameter._module_info.param_name
            if not isinstance(layer, Float8Linear) or name != "weight":
                continue
            # What torch reads, and keeps: the functions go with this tensor.
            rows: Any = parameter.sharded_param._local_tensor
            shard = Float8Shard(rows, layer.linear_mm_config, dtype)
            rows.fsdp_pre_all_gather, rows.fsdp_post_all_gather = shard.before, shard.after
            parameter._init_extensions()
            self.shards.append(shard)

    @torch.no_grad()
    def rescale(self) -> None:
        """Recompute all scales from the updated weights, with one all-reduce."""
        from torchao.float8.float8_utils import amax_to_scale

        if not self.shards:
            return
        all_rows = [shard.rows for shard in self.shards]
        norms = iter(foreach_norm([rows for rows in all_rows if rows.numel()], math.inf))
        # Of fewer rows than ranks, the last ranks have none.
        amaxes = [next(norms) if rows.numel() else rows.new_zeros(()) for rows in all_rows]
        largest = torch.stack(amaxes)
        if self._link.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, self._link.group)
        scales = amax_to_scale(largest.to(self._dtype), _E4M3)
        for shard, scale in zip(self.shards, scales.unbind(), strict=True):
            shard.scale = scale
