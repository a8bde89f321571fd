"""Linear layers whose weight gradients can wait: the split of the backward in two.

A zero-bubble schedule computes the gradients of a stage's inputs first, since the stage before it
waits for them, and those of its weights when it would idle. arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

Work = Callable[[], None]


class Deferral:
    """Where weight gradients wait; `pending` is None while they are to be computed at once."""

    def __init__(self) -> None:
        self.pending: list[Work] | None = None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owner: Tensor, deferral: Deferral
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner, ctx.deferral, ctx.has_bias = owner, deferral, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        x_grad = grad @ weight if ctx.needs_input_grad[0] else None
        rows = grad.flatten(0, -2)
        bias_grad = rows.sum(0) if ctx.has_bias else None
        if ctx.deferral.pending is None:
            return x_grad, rows.t() @ x.flatten(0, -2), bias_grad, None, None
        owner = ctx.owner
        ctx.deferral.pending.append(lambda: _accumulate(owner, rows, x.flatten(0, -2)))
        return x_grad, None, bias_grad, None, None


@torch.no_grad()
def _accumulate(owner: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Add the gradient `rows.T @ inputs` to a parameter's, as autograd would have done.

    The product belongs in here: outside, the gradient would have a graph of its own, which keeps
    both of its factors until the next microbatch.
    """
    grad = rows.t() @ inputs
    if isinstance(owner, DTensor):
        grad = DTensor.from_local(grad, owner.device_mesh, owner.placements, run_check=False)
    owner.grad = grad if owner.grad is None else owner.grad + grad


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral) -> Tensor:
    """Return `x @ weight.T + bias`; x `[..., in]`, weight `[out, in]` a parameter or a DTensor."""
    shard = weight.to_local() if isinstance(weight, DTensor) else weight
    out: Tensor = _Linear.apply(x, shard, bias, weight, deferral)  # type: ignore[no-untyped-call]
    return out
