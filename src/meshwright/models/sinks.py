"""Attention sinks: one more score per head in every softmax, without a value.

arXiv:2309.17453, section 3.3, as in gpt-oss. A sink is equivalent to a block of attention with
value 0 and the sink's score as log-sum-exp: merging it into the result of a kernel without sinks
makes that result smaller and the log-sum-exp larger. The backward of any block uses both unchanged,
because `exp(score - lse)` are then the true probabilities. arXiv:2205.14135, algorithm 4.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge sinks into the result of attention without sinks, and into its log-sum-exp, in place.

    out `[batch, heads, seq, head_dim]`, lse `[batch, heads, seq]` in base e, fp32 at least, sinks
    `[heads]`.
    """
    scores = sinks.to(lse.dtype)[:, None]
    out.mul_(torch.sigmoid(lse - scores).unsqueeze(-1))
    torch.logaddexp(lse, scores, out=lse)


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks `[heads]`, given `grad`, the gradient of `out`.

    `out` and `lse` (base e) include the sinks.
    """
    along = (grad * out).sum(-1, dtype=lse.dtype)
    shares = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(shares * along).sum((0, 2)).to(sinks.dtype)
