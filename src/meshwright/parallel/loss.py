"""The output head and the cross-entropy of its logits, a few tokens at a time.

Logits are the largest tensor of a model with a large vocabulary, and never exist as a whole. The
backward computes the logits of some tokens, their loss and gradient, and at once their part of the
gradients of the head's weight and input. Liger Kernel, arXiv:2410.10989, section 3.2, does so in
the forward. In the backward, which needs the same matmuls, a schedule may have any number of
forwards in flight, and the gradient is scaled before it is rounded to half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.comm.groups import Link
from meshwright.models.ops import softcapped
from meshwright.parallel.data_parallel.sharded import HeadUnit
from meshwright.parallel.tensor_parallel.deferred import local
from meshwright.parallel.tensor_parallel.tp_regions import TPRegion, begin_gather

# The logit of padding: its exponential is zero. A rank may have nothing else, so it is finite.
_NEVER: Final = torch.finfo(torch.float32).min


def loss_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore: int,
    tp_region: TPRegion,
    at_once: int,
    *,
    fuses: bool = False,
    cap: float | None = None,
    unit: HeadUnit | None = None,
    vocab: int | None = None,
) -> Tensor:
    """Return the summed cross-entropy in nats in fp32, the same on all tp ranks.

    hidden `[batch, seq or its shard, dim]` enters `tp_region`, and is multiplied by weight `[vocab
    / ranks, dim]`; targets int64 `[batch, seq]` have global ids, and those equal to `ignore` don't
    count. Logits of `at_once` tokens exist together. If gradients are recorded, the value is NaN
    until the backward fills it in. `fuses` compiles loss and gradient, which requires an unsharded
    vocabulary. `cap` is the soft cap of logits. If `unit` is given, it provides the weights instead
    of `weight` and receives their gradient. Rows of the whole weight after the first `vocab` are
    padding: they take no part in the loss.
    """
    if torch.is_grad_enabled():
        local_weight = None if unit is not None else local(weight)
        out: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
            hidden,
            local_weight,
            targets.flatten(),
            ignore,
            tp_region,
            at_once,
            fuses,
            cap,
            unit,
            vocab,
        )
        return out
    local_weight = local(weight if unit is None else unit.gather())
    inputs = tp_region.entering(hidden)().flatten(0, 1)
    total = inputs.new_zeros((), dtype=torch.float32)
    for rows in _chunks(len(inputs), at_once):
        total += soften(
            inputs[rows] @ local_weight.t(),
            targets.flatten()[rows],
            ignore,
            tp_region.link,
            cap,
            vocab,
        ).loss
    return total


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        targets: Tensor,
        ignore: int,
        tp_region: TPRegion,
        at_once: int,
        fuses: bool,
        cap: float | None,
        unit: HeadUnit | None,
        vocab: int | None,
    ) -> Tensor:
        value = hidden.new_full((), float("nan"), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, targets, value)
        ctx.ignore, ctx.tp_region, ctx.at_once, ctx.fuses = ignore, tp_region, at_once, fuses
        ctx.cap, ctx.unit, ctx.vocab = cap, unit, vocab
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, value = ctx.saved_tensors
        tp_region: TPRegion = ctx.tp_region
        unit: HeadUnit | None = ctx.unit
        is_trained = ctx.needs_input_grad[1]
        if unit is not None:
            weight, is_trained = local(unit.gather().detach()), unit.is_trained
        gathered = tp_region.entering(hidden)()
        inputs = gathered.flatten(0, 1)
        back = torch.empty_like(gathered)
        sent = total = None
        losses = []
        for rows in _chunks(len(inputs), ctx.at_once):
            if ctx.fuses:
                logits = inputs[rows] @ weight.t()
                loss, logits_grad = _fused()(
                    logits, targets[rows], ctx.ignore, grad, ctx.cap, ctx.vocab
                )
                del logits
            else:
                logits = inputs[rows] @ weight.t()
                softmax = soften(
                    logits, targets[rows], ctx.ignore, tp_region.link, ctx.cap, ctx.vocab
                )
                del logits
                loss, logits_grad = softmax.loss, softmax.gradient(grad, weight.dtype)
                del softmax
            losses.append(loss)
            back.view_as(inputs)[rows] = logits_grad @ weight
            if rows.stop == len(inputs):  # it travels beside the last of the weight's products
                sent = tp_region.returning(back)
                del back  # it would keep what has been sent
            if not is_trained:
                pass
            elif total is None:
                total = logits_grad.t() @ inputs[rows]
            else:
                total.addmm_(logits_grad.t(), inputs[rows])
            del logits_grad
        assert sent is not None
        value.detach().copy_(torch.stack(losses).sum())
        del gathered, inputs
        if unit is not None:
            del weight
            unit.leave(total)
            total = None
        return sent(), total, None, None, None, None, None, None, None, None


class Softmax(NamedTuple):
    """The summed loss of some tokens, and the inputs of its gradient.

    `exponentials` fp32 `[rows, vocab / ranks]` times `shares` `[rows]` are the probabilities.
    `local_targets` index this rank's vocabulary where `inside` is true; tokens that are not
    `counted` have no target. `slopes`, shaped like the logits, are the derivatives of a soft cap.
    """

    loss: Tensor
    exponentials: Tensor
    shares: Tensor
    local_targets: Tensor
    inside: Tensor
    counted: Tensor
    slopes: Tensor | None = None

    def gradient(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gradient of the logits, given that of the loss; overwrites `exponentials`."""
        wide = self.exponentials.mul_((self.shares * self.counted * grad)[:, None])
        wide.scatter_add_(-1, self.local_targets[:, None], -(self.inside * grad)[:, None])
        if self.slopes is not None:
            wide.mul_(self.slopes)
        return wide.to(dtype)


def soften(
    logits: Tensor,
    targets: Tensor,
    ignore: int,
    link: Link,
    cap: float | None = None,
    vocab: int | None = None,
) -> Softmax:
    """Return loss and softmax of logits `[rows, vocab / ranks]`; overwrites them if they are fp32.

    Logits after the first `vocab` of all ranks are padding, and have no probability. targets int64
    `[rows]` have global ids. With a sharded vocabulary, one all-gather sends three numbers per
    token: the largest logit, the sum of exponentials and the target's logit. arXiv:1909.08053,
    section 3.
    """
    local_targets, counted = targets - link.rank * logits.shape[-1], targets != ignore
    inside = (local_targets >= 0) & (local_targets < logits.shape[-1]) & counted
    local_targets.masked_fill_(~inside, 0)
    wide, slopes = logits.float(), None
    if cap is not None:  # the slope of cap * tanh(x / cap) is 1 - tanh^2
        shares = wide.div_(cap).tanh_()
        slopes = torch.addcmul(shares.new_ones(()), shares, shares, value=-1)
        wide = shares.mul_(cap)
    if vocab is not None:
        _leave_out(wide, vocab - link.rank * wide.shape[-1])
    picked = wide.gather(-1, local_targets[:, None])[:, 0].masked_fill_(~inside, 0)
    top = wide.amax(-1)
    exponentials = wide.sub_(top[:, None]).exp_()
    total = exponentials.sum(-1)
    largest = top
    if link.size > 1:
        sent = torch.stack([top, total, picked])[None]
        tops, totals, picks = begin_gather(sent, link)().view(link.size, 3, -1).unbind(1)
        largest, picked = tops.amax(0), picks.sum(0)
        total = (totals * (tops - largest).exp_()).sum(0)
    # The two logits first: the loss is small where both are large.
    loss = ((total.log() + (largest - picked)) * counted).sum()
    share = (top - largest).exp_() / total
    return Softmax(loss, exponentials, share, local_targets, inside, counted, slopes)


def loss_and_gradient(
    logits: Tensor,
    targets: Tensor,
    ignore: int,
    grad: Tensor,
    cap: float | None = None,
    vocab: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of unsharded logits `[rows, vocab]`, and their gradient in their
    dtype.

    The same as `soften` and `Softmax.gradient`, written for a compiler: without fp32 tensors of the
    logits' size.
    """
    counted = targets != ignore
    classes = targets.masked_fill(~counted, 0)[:, None]
    wide = real = softcapped(logits.float(), cap)
    if vocab is not None and vocab < logits.shape[-1]:
        is_padding = torch.arange(logits.shape[-1], device=logits.device) >= vocab
        real = wide.masked_fill(is_padding, _NEVER)
    top = real.amax(-1, keepdim=True)
    exponentials = (real - top).exp()
    total = exponentials.sum(-1, keepdim=True)
    loss = ((total.log() + (top - wide.gather(-1, classes)))[:, 0] * counted).sum()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == classes
    scale = (counted * grad)[:, None]
    gradient = exponentials * (scale / total) - is_target * scale
    if cap is not None:
        gradient = gradient * (1 - (wide / cap) ** 2)
    return loss, gradient.to(logits.dtype)


def _leave_out(logits: Tensor, real: int) -> None:
    """Set all but the first `real` logits of each row to a value with probability 0, in place."""
    if real < logits.shape[-1]:
        logits[:, max(real, 0) :] = _NEVER


@cache
def _fused() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `loss_and_gradient` compiled; cached, as importing the compiler takes a second."""
    return torch.compile(loss_and_gradient)


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` tokens."""
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))
