"""Linear layers that share an input, with control over the order of their backward matmuls.

The input gradient is reduced over tp while weight gradients are computed, as in Megatron-Core's
linear layers. Weight gradients can also wait longer: a zero-bubble schedule first computes the
input gradients of a stage, which the previous stage waits for, and the weight gradients when the
rank would be idle. arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright.comm.groups import Link
from meshwright.parallel.tensor_parallel.tp_regions import TPRegion

Work = Callable[[], None]
ALONE = TPRegion(Link(None, (0,), 0), sp=False)


class Deferral:
    """The queue of deferred weight gradients; `pending` is None if they are computed at once.

    `splits`: weight gradients may be deferred. Then linear layers are not part of a compiled block,
    because a compiled backward returns all its gradients together.
    """

    def __init__(self) -> None:
        self.pending: list[Work] | None = None
        self.splits = False


def local(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter as a differentiable plain tensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Linears(torch.autograd.Function):
    """Autograd function: enters a tensor-parallel region, and applies several linear layers.

    One function, so that autograd has the weights' gradients when it has the input's: data
    parallelism's hooks need no special treatment.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp_region: TPRegion,
        deferral: Deferral,
        owners: Sequence[Tensor],
        count: int,
        *shards: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = shards[:count], shards[count:]
        inputs = tp_region.entering(x)()
        ctx.save_for_backward(x if tp_region.gathers_again else inputs, *weights)
        ctx.tp_region, ctx.deferral, ctx.owners = tp_region, deferral, owners
        ctx.has_bias = [bias is not None for bias in biases]
        pairs = zip(weights, biases, strict=True)
        return tuple(_product(inputs, weight, bias) for weight, bias in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, *weights = ctx.saved_tensors
        tp_region: TPRegion = ctx.tp_region
        rows = [grad.flatten(0, -2) for grad in grads]
        gather_again = tp_region.entering(saved) if tp_region.gathers_again else lambda: saved
        part = None
        if ctx.needs_input_grad[0]:
            part = _input_grad(rows, weights).view(*grads[0].shape[:-1], -1)
        inputs = gather_again().flatten(0, -2)
        sent = None if part is None else tp_region.returning(part)
        del gather_again, part  # they would keep what was gathered, and what has been sent
        biases = [
            grad_rows.sum(0) if has else None
            for grad_rows, has in zip(rows, ctx.has_bias, strict=True)
        ]
        pending = ctx.deferral.pending
        weight_grads: list[Tensor | None] = []
        for owner, grad_rows in zip(ctx.owners, rows, strict=True):
            if pending is None:
                weight_grads.append(_weight_grad(grad_rows, inputs))
            else:
                pending.append(_accumulation(owner, grad_rows, inputs))
                weight_grads.append(None)
        return None if sent is None else sent(), None, None, None, None, *weight_grads, *biases


def _product(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return `inputs @ weight.T + bias`."""
    assert weight is not None
    return F.linear(inputs, weight, bias)


def _input_grad(rows: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of `rows @ weight` over the layers, `[tokens, in]`, in new memory."""
    total = rows[0] @ weights[0]
    for grad_rows, weight in zip(rows[1:], weights[1:], strict=True):
        total += grad_rows @ weight
    return total


def _weight_grad(rows: Tensor, inputs: Tensor) -> Tensor:
    """Return the weight gradient `[out, in]` from output gradients and inputs of tokens."""
    return rows.t() @ inputs


def _accumulation(owner: Tensor, rows: Tensor, inputs: Tensor) -> Work:
    return lambda: _accumulate(owner, rows, inputs)


@torch.no_grad()
def _accumulate(owner: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Add the weight gradient `rows.T @ inputs` to that of `owner`, as autograd would have done.

    The matmul belongs in here: outside, the gradient would have a graph of its own, which keeps
    both of its factors until the next microbatch.
    """
    if owner.grad is not None:
        total = local(owner.grad)
        # The product adds by itself: its result is not written, read and dropped again.
        if total.dtype == rows.dtype:
            total.addmm_(rows.t(), inputs)
        else:
            total.add_(_weight_grad(rows, inputs))
        return
    _begin(owner, _weight_grad(rows, inputs))


def _begin(owner: Tensor, grad: Tensor) -> None:
    """Set a parameter's gradient, which it has none of yet, as a DTensor if the parameter
    is one.
    """
    if isinstance(owner, DTensor):
        grad = DTensor.from_local(grad, owner.device_mesh, owner.placements, run_check=False)
    owner.grad = grad


@torch.no_grad()
def defer(owner: Tensor, make: Callable[[], Tensor]) -> None:
    """Compute a gradient by `make` and add it to that of `owner`, as autograd would have done."""
    if owner.grad is None:
        _begin(owner, make())
    else:
        local(owner.grad).add_(make())


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    deferral: Deferral,
    tp_region: TPRegion = ALONE,
) -> tuple[Tensor, ...]:
    """Return `x @ weight.T + bias` of each layer, after `x` has entered the region.

    x `[batch, seq or its shard, in]`, or of any shape `[..., in]` without a region; weights `[out,
    in]` are parameters or DTensors.
    """
    apply = _linears_apart if deferral.splits else _linears
    out: tuple[Tensor, ...] = apply(x, weights, biases, deferral, tp_region)
    return out


def _linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    deferral: Deferral,
    tp_region: TPRegion,
) -> tuple[Tensor, ...]:
    shards = [*map(local, weights), *(None if bias is None else local(bias) for bias in biases)]
    out: tuple[Tensor, ...] = _Linears.apply(  # type: ignore[no-untyped-call]
        x, tp_region, deferral, tuple(weights), len(weights), *shards
    )
    return out


# Not compiled, whatever it is called from.
_linears_apart: Any = torch.compiler.disable(_linears)  # type: ignore[no-untyped-call]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral) -> Tensor:
    """Return `x @ weight.T + bias`, without a region; see `linears`."""
    return linears(x, (weight,), (bias,), deferral)[0]
