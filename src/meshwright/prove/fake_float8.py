"""A linear layer in float8, simulated in plain torch operations.

Each operand is scaled by its own largest value: inputs and weights to e4m3, gradients to e5m2, as
in arXiv:2209.05433, section 3. Products and their sums stay in fp32, and are rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` with operands rounded to float8; x `[..., in]`, weight `[out,
    in]`; the result has the dtype of x.
    """
    out: Tensor = _Float8Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        e4m3 = torch.float8_e4m3fn
        return (_rounded(x, e4m3) @ _rounded(weight, e4m3).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        wide = _rounded(grad, torch.float8_e5m2)
        of_x = wide @ _rounded(weight, torch.float8_e4m3fn)
        rows = wide.flatten(0, -2).t() @ _rounded(x, torch.float8_e4m3fn).flatten(0, -2)
        return of_x.to(x.dtype), rows.to(weight.dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in fp32, rounded to float8 with a scale that maps its largest value to the largest
    float8 number.
    """
    wide = x.float()
    scale = torch.finfo(dtype).max / wide.abs().max().clamp(min=1e-12)
    return (wide * scale).to(dtype).float() / scale
