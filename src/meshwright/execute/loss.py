"""Cross-entropy that overwrites the logits by their gradient, whole or cut over the vocabulary.

What is kept from the forward to the backward is the logits, in the dtype of products. `log_softmax`
keeps its result in fp32 and needs two more of the size; here what is wide is a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.execute.borders import all_reduce
from meshwright.execute.groups import Link
from meshwright.program.operations import loss_rows


def loss_sum(logits: Tensor, targets: Tensor, ignore: int, link: Link) -> Tensor:
    """Return the summed cross-entropy in nats in fp32, the same on all ranks of a link over tp.

    logits `[tokens, vocab / ranks]`, which the backward overwrites and nothing else may need;
    targets int64 `[tokens]` with global ids, those that are `ignore` count for nothing. Where ranks
    cut the vocabulary, three numbers per token travel: the maximum, the sum of exponentials and the
    target's logit. arXiv:1909.08053, section 3.
    """
    out: Tensor = _Loss.apply(logits, targets, ignore, link)  # type: ignore[no-untyped-call]
    return out


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore: int, link: Link) -> Tensor:
        own = targets - link.rank * logits.shape[-1]
        inside = (own >= 0) & (own < logits.shape[-1]) & (targets != ignore)
        own = own.masked_fill_(~inside, 0)
        top = logits.amax(-1).float()
        if link.size > 1:
            top = all_reduce(top, link, "max")
        picked = logits.gather(-1, own[:, None])[:, 0].float().sub_(top).masked_fill_(~inside, 0)
        total = torch.empty_like(top)
        for rows in _chunks(logits):
            total[rows] = (logits[rows].float() - top[rows, None]).exp_().sum(-1)
        if link.size > 1:
            total, picked = all_reduce(torch.stack([total, picked]), link).unbind(0)
        counted = targets != ignore
        sums = total.log()
        ctx.save_for_backward(logits, top + sums, own, inside, counted)
        return ((sums - picked) * counted).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        kept, sums, own, inside, counted = ctx.saved_tensors
        logits = kept.detach()
        factor = counted * grad
        for rows in _chunks(logits):
            wide = (logits[rows].float() - sums[rows, None]).exp_()
            wide.scatter_add_(-1, own[rows, None], -inside[rows, None].to(wide.dtype))
            logits[rows] = wide.mul_(factor[rows, None])
        return logits, None, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of rows that are widened together."""
    tokens, vocab = logits.shape
    each = loss_rows(tokens, vocab, on_cpu=logits.device.type == "cpu")
    for start in range(0, tokens, each):
        yield slice(start, start + each)
