"""Attention sinks: one more score of each head in every softmax, which no value belongs to.

arXiv:2309.17453, section 3.3, as gpt-oss has them. A sink is a block of attention with a value of
zero and its score for log-sum-exp: merged into what kernels give without it, it makes the result
smaller and the log-sum-exp larger. The backward of any block takes both as they are, since
`exp(score - lse)` are the true probabilities then. arXiv:2205.14135, algorithm 4.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge the sinks of heads into attention and its log-sum-exp, in place.

    out `[batch, heads, seq, head_dim]`, lse `[batch, heads, seq]` in powers of e, fp32 at least,
    sinks `[heads]`.
    """
    scores = sinks.to(lse.dtype)[:, None]
    out.mul_(torch.sigmoid(lse - scores).unsqueeze(-1))
    torch.logaddexp(lse, scores, out=lse)


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks `[heads]`; `out` and `lse` have them, `grad` is that of `out`.

    A sink takes its share of the probability from values that add up to `out`.
    """
    along = (grad * out).sum(-1, dtype=lse.dtype)
    shares = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(shares * along).sum((0, 2)).to(sinks.dtype)
