"""Weights in NF4, four bits each: QLoRA, arXiv:2305.14314, section 3 and appendix E.

Each block of 64 inputs of an output has a scale, its largest magnitude. A number is the nearest of
16 levels, quantiles of a normal distribution, times the scale. A byte contains two numbers, the
first in its upper half, as in bitsandbytes and torchao. The fp32 scales of a row follow its numbers
in the same uint8 tensor, so that a sharded weight is one tensor, whether cut between rows or
between blocks.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.spec.lora import NF4_BLOCK, NF4_PIECE, nf4_bytes

LEVELS: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_LEAST: Final = 1e-38  # in place of the scale of a block of zeros


def pairs(device: torch.device | str) -> Tensor:
    """Return the dequantisation table: the two levels that each byte encodes, fp32 `[256, 2]`."""
    levels = torch.tensor(LEVELS, device=device)
    first, second = levels.repeat_interleave(len(LEVELS)), levels.repeat(len(LEVELS))
    return torch.stack((first, second), -1)


@torch.no_grad()
def quantise(weight: Tensor) -> Tensor:
    """Quantise a weight `[out, in]` to NF4: uint8 `[out, nf4_bytes(in)]`.

    Quantising its `dequantise` again gives the same bytes.
    """
    blocks = weight.float().reshape(len(weight), -1, NF4_BLOCK)
    scales = blocks.abs().amax(-1)
    levels = torch.tensor(LEVELS, device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / scales.clamp(min=_LEAST)[..., None], between).flatten(1)
    codes = codes.to(torch.uint8)
    return torch.cat((codes[:, ::2] << 4 | codes[:, 1::2], scales.view(torch.uint8)), -1)


@torch.no_grad()
def dequantise(packed: Tensor, dtype: torch.dtype, table: Tensor | None = None) -> Tensor:
    """Return the weight `[out, in]` in `dtype`, from its NF4 bytes uint8 `[out, nf4_bytes(in)]`.

    `table` is the result of `pairs`; None computes it. It works on a few rows at once, to limit
    temporary memory.
    """
    table = pairs(packed.device) if table is None else table
    inner = packed.shape[1] * NF4_BLOCK // nf4_bytes(NF4_BLOCK)
    out = torch.empty(len(packed), inner, dtype=dtype, device=packed.device)
    at_once = max(NF4_PIECE // inner, 1)
    for rows, packed_rows in zip(
        torch.split(out, at_once), torch.split(packed, at_once), strict=True
    ):
        scales = packed_rows[:, inner // 2 :].view(torch.float32)
        values = F.embedding(packed_rows[:, : inner // 2].int(), table)
        values = values.view(len(packed_rows), -1, NF4_BLOCK).mul_(scales[..., None])
        rows.copy_(values.view_as(rows))
        del values  # before the next ones
    return out


class _Product(torch.autograd.Function):
    """A linear layer with a frozen NF4 weight, dequantised in the forward and again in the
    backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, table: Tensor) -> Tensor:
        ctx.packed, ctx.table = packed, table
        return F.linear(x, dequantise(packed, x.dtype, table), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad @ dequantise(ctx.packed, grad.dtype, ctx.table), None, None, None


def product(layer: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`, where `weight` is the layer's weight or this rank's part of it.

    A uint8 weight is in NF4; then `layer.levels` is the table of `pairs`.
    """
    if weight.dtype != torch.uint8:
        return F.linear(x, weight, bias)
    out: Tensor = _Product.apply(x, weight, bias, layer.levels)  # type: ignore[no-untyped-call]
    return out


class NF4Linear(nn.Linear):
    """A linear layer without a LoRA adapter whose weight is in NF4."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output `[..., out]` for `input` `[..., in]`."""
        return product(self, input, self.weight, self.bias)
