"""The short causal convolution before a recurrence: of each channel, within documents.

Its hand-written backward saves the input and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.models.ops import returned, widened


class ShortConv(nn.Module):
    """The parameters of a convolution `[channels, 1, kernel]` with a bias of each channel."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        self.bias = nn.Parameter(torch.empty(channels))


def last_tokens(x: Tensor, before: Tensor | None, count: int) -> Tensor:
    """Return the last tokens `[batch, count, channels]`: zeros before the first."""
    x = x if before is None else torch.cat((before, x), 1)
    return F.pad(x, (0, 0, max(count - x.shape[1], 0), 0))[:, -count:] if count else x[:, :0]


def short_conv(
    x: Tensor,
    weight: Tensor,
    segments: Tensor | None = None,
    before: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the SiLU of a causal convolution of each channel, in fp32 at least; as x.

    x `[batch, seq, channels]`, weight `[channels, 1, kernel]`, of which the last column is that of
    the token itself, bias `[channels]`. A token sees those of its own segment, int `[batch, seq]`.
    `before` are the last tokens before x; None: zeros.
    """
    if before is None:
        return _conv(x, weight, bias, segments)
    return _conv(torch.cat((before, x), 1), weight, bias, segments)[:, before.shape[1] :]


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
    out: Tensor = _ShortConv.apply(x, weight, bias, segments)  # type: ignore[no-untyped-call]
    return out


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, segments)
        return returned(F.silu(_convolved(x, weight, bias, segments)).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, segments = ctx.saved_tensors
        mixed = _convolved(x, weight, bias, segments)
        torch.ops.aten.silu_backward.grad_input(widened(grad), mixed, grad_input=mixed)
        wide, columns = widened(x), widened(weight)[:, 0].unbind(1)
        to_x = mixed * columns[-1]
        to_weight = [(mixed * wide).sum((0, 1))]
        for back, column in enumerate(reversed(columns[:-1]), 1):
            later = _of_same(mixed[:, back:], segments, back)
            to_x[:, : later.shape[1]].addcmul_(later, column)
            to_weight.append((later * wide[:, : later.shape[1]]).sum((0, 1)))
        to_taps = torch.stack(to_weight[::-1], 1)[:, None].to(weight.dtype)
        to_bias = None if bias is None else mixed.sum((0, 1)).to(bias.dtype)
        return to_x.to(x.dtype), to_taps, to_bias, None


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
    """Return the convolution of x in fp32 at least."""
    wide, columns = widened(x), widened(weight)[:, 0].unbind(1)
    mixed = wide * columns[-1]
    for back, column in enumerate(reversed(columns[:-1]), 1):
        mixed[:, back:] += _of_same(wide[:, : max(x.shape[1] - back, 0)], segments, back) * column
    return mixed if bias is None else mixed.add_(widened(bias))


def _of_same(x: Tensor, segments: Tensor | None, back: int) -> Tensor:
    """Return x `[batch, seq - back, channels]`, zero where a token's segment starts in between."""
    if segments is None:
        return x
    return x * (segments[:, back:] == segments[:, : segments.shape[1] - back])[..., None]
