"""The short causal convolution before a recurrence: of each channel, within documents.

Its hand-written backward saves the input and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


class Taps(NamedTuple):
    """What a convolution takes; `short_conv` has the shapes."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    before: Tensor | None = None


def convolve(taps: Sequence[Taps], segments: Tensor | None) -> list[Tensor]:
    """Return the results of the convolutions of a layer."""
    return [short_conv(x, weight, segments, before, bias) for x, weight, bias, before in taps]


def short_conv(
    x: Tensor,
    weight: Tensor,
    segments: Tensor | None = None,
    before: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the SiLU of a causal convolution of each channel, in fp32 at least; as x.

    x `[batch, seq, channels]`, weight `[channels, 1, kernel]`, of which the last column is that of
    the token itself, bias `[channels]`. `before` `[batch, kernel - 1, channels]` are the last
    tokens before x; None: zeros. A token sees those of its own segment, int `[batch, seq]`, with
    those of `before` first, if there are any.
    """
    out: Tensor = _ShortConv.apply(x, weight, bias, segments, before)  # type: ignore[no-untyped-call]
    return out


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        segments: Tensor | None,
        before: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, segments, before)
        return returned(F.silu(_convolved(x, weight, bias, segments, before)).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, segments, before = ctx.saved_tensors
        mixed = _convolved(x, weight, bias, segments, before)
        torch.ops.aten.silu_backward.grad_input(widened(grad), mixed, grad_input=mixed)
        wide, columns = widened(x), widened(weight)[:, 0].unbind(1)
        of_x = _of_x(segments, before)
        to_before = None if before is None else torch.zeros_like(before, dtype=mixed.dtype)
        to_x = mixed * columns[-1]
        to_weight = [(mixed * wide).sum((0, 1))]
        for back, column in enumerate(reversed(columns[:-1]), 1):
            later = _of_same(mixed[:, back:], of_x, back)
            to_x[:, : later.shape[1]].addcmul_(later, column)
            to_column = (later * wide[:, : later.shape[1]]).sum((0, 1))
            if before is not None and to_before is not None:
                seen, first = _seen_before(before, segments, back, mixed.shape[1])
                seeing = mixed[:, : seen.shape[1]] * first
                to_column += (seeing * widened(seen)).sum((0, 1))
                start = before.shape[1] - back
                to_before[:, start : start + seen.shape[1]].addcmul_(seeing, column)
            to_weight.append(to_column)
        to_taps = torch.stack(to_weight[::-1], 1)[:, None].to(weight.dtype)
        to_bias = None if bias is None else mixed.sum((0, 1)).to(bias.dtype)
        if to_before is not None:
            to_before = to_before.to(x.dtype)
        return to_x.to(x.dtype), to_taps, to_bias, None, to_before


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Tensor | None,
    before: Tensor | None,
) -> Tensor:
    """Return the convolution of x in fp32 at least."""
    wide, columns = widened(x), widened(weight)[:, 0].unbind(1)
    of_x = _of_x(segments, before)
    mixed = wide * columns[-1]
    for back, column in enumerate(reversed(columns[:-1]), 1):
        mixed[:, back:] += _of_same(wide[:, : max(x.shape[1] - back, 0)], of_x, back) * column
        if before is not None:
            seen, first = _seen_before(before, segments, back, x.shape[1])
            mixed[:, : seen.shape[1]] += widened(seen) * first * column
    return mixed if bias is None else mixed.add_(widened(bias))


def _of_x(segments: Tensor | None, before: Tensor | None) -> Tensor | None:
    """Return the segments of x, without those of the tokens before it."""
    return segments if segments is None or before is None else segments[:, before.shape[1] :]


def _seen_before(
    before: Tensor, segments: Tensor | None, back: int, length: int
) -> tuple[Tensor, Tensor | float]:
    """Return the tokens before x `[batch, n, channels]` that its first n tokens see, each `back`
    tokens before it, and whether each is of its segment `[batch, n, 1]`.
    """
    start = before.shape[1] - back
    seen = before[:, start : start + length]
    if segments is None:
        return seen, 1.0
    tokens = slice(start, start + seen.shape[1])
    return seen, (segments[:, back:][:, tokens] == segments[:, tokens])[..., None]


def _of_same(x: Tensor, segments: Tensor | None, back: int) -> Tensor:
    """Return x `[batch, seq - back, channels]`, zero where a token's segment starts in between."""
    if segments is None:
        return x
    return x * (segments[:, back:] == segments[:, : segments.shape[1] - back])[..., None]
