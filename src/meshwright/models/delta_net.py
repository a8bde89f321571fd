"""Gated DeltaNet, a recurrent layer in place of attention: arXiv:2412.06464, section 3.4.

Queries, keys and values pass a short causal convolution and a SiLU, then the gated delta rule of
`models.delta_rule`, whose result is normalized per head and multiplied by a gate. The convolution,
the gates and the norm have hand-written backwards, which save their inputs and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.models.attention import Project, each
from meshwright.models.cache import kept_by
from meshwright.models.chunks import recur
from meshwright.models.context import PLAIN, Context
from meshwright.models.delta_rule import DELTA_RULE
from meshwright.models.lora import add_linears
from meshwright.models.ops import returned, widened
from meshwright.models.short_conv import Taps, convolve, last_tokens
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import delta_linears


class GatedNorm(nn.Module):
    """An RMSNorm of each head, multiplied by the SiLU of a gate."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return `norm(x) * weight * silu(gate)` of heads `[..., dim]`."""
        out: Tensor = _GatedNorm.apply(x, gate, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class GatedDeltaNet(nn.Module):
    """The Gated DeltaNet layer: seven linear layers around the gated delta rule.

    `queries` and `keys` output one of each for each key head; `values` and the output gates `z` are
    those of the value heads; heads that share a key follow each other. Of `b` and `a`, one number
    for each value head, `gates` computes strengths and decays; `out` is the last layer.

    Tensor parallelism may replace `project`, which computes all linear layers but `out`, and
    `local`, which returns this rank's part of a parameter; context parallelism `convolve` and
    `recur`, which continue earlier tokens. The number of heads follows from the width of the
    projections' outputs, so a rank may have a part of the heads. The cache stores the last state
    and the last inputs of the convolution.
    """

    queries: nn.Linear
    keys: nn.Linear
    values: nn.Linear
    z: nn.Linear
    b: nn.Linear
    a: nn.Linear
    out: nn.Linear

    def __init__(self, spec: ModelSpec, layer: str) -> None:
        super().__init__()
        self.key_dim, self.value_dim = spec.delta_key_dim, spec.delta_value_dim
        keys = spec.delta_key_heads * self.key_dim
        values = spec.delta_heads * self.value_dim
        add_linears(self, spec, delta_linears(spec))
        kernel = spec.delta_kernel
        self.q_conv, self.k_conv, self.v_conv = (
            nn.Parameter(torch.empty(channels, 1, kernel)) for channels in (keys, keys, values)
        )
        self.a_log = nn.Parameter(torch.empty(spec.delta_heads))
        self.dt_bias = nn.Parameter(torch.empty(spec.delta_heads))
        self.gated_norm = GatedNorm(self.value_dim, spec.norm_eps)
        self.layer = layer
        self.project: Project = each
        self.local: Callable[[Tensor], Tensor] = lambda parameter: parameter
        self.convolve, self.recur = convolve, recur

    def forward(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        """Return the layer's output for `x` `[batch, seq, dim]`, of the same shape."""
        layers = self.queries, self.keys, self.values, self.z, self.b, self.a
        *inputs, z, b, a = self.project(x, layers, context)
        strength, decay = gates(b, a, self.local(self.a_log), self.local(self.dt_bias))
        del b, a
        segments, states = context.documents, kept_by(context.cache, self.layer, 4)
        weights = map(self.local, (self.q_conv, self.k_conv, self.v_conv))
        taps = [
            Taps(x, weight, None, before)
            for x, weight, before in zip(inputs, weights, states[:3], strict=True)
        ]
        dims = self.key_dim, self.key_dim, self.value_dim
        convolved = zip(self.convolve(taps, segments), dims, strict=True)
        q, k, v = (torch.unflatten(x, 2, (-1, dim)) for x, dim in convolved)
        read, last = self.recur(DELTA_RULE, (q, k, v, decay, strength), segments, states[3])
        del q, k, v
        if context.cache is not None:
            count = self.q_conv.shape[-1] - 1
            tails = [last_tokens(tap.x, tap.before, count) for tap in taps]
            context.cache.keep(self.layer, (*tails, last))
        del inputs, taps
        z = torch.unflatten(z, 2, (-1, self.value_dim))
        result: Tensor = self.out(self.gated_norm(read, z).flatten(2))
        return result


def gates(b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return write strengths `sigmoid(b)` and log-decays `-exp(a_log) * softplus(a + dt_bias)`.

    Both are `[batch, seq, heads]`, like `b` and `a`, log-decays in fp32. arXiv:2405.21060, section
    7.1.
    """
    out: tuple[Tensor, Tensor] = _Gates.apply(b, a, a_log, dt_bias)  # type: ignore[no-untyped-call]
    return out


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(b, a, a_log, dt_bias)
        rate = -widened(a_log).exp()
        return torch.sigmoid(b), F.softplus(widened(a) + widened(dt_bias)).mul_(rate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_strength: Tensor, to_decay: Tensor) -> tuple[Tensor | None, ...]:
        b, a, a_log, dt_bias = ctx.saved_tensors
        shifted = widened(a) + widened(dt_bias)
        rate = -widened(a_log).exp()
        share = torch.sigmoid(b)
        to_b = to_strength * share * (1 - share)
        to_rate = (to_decay * F.softplus(shifted)).sum((0, 1)) * rate
        to_shifted = to_decay * rate * torch.sigmoid(shifted)
        to_bias = to_shifted.sum((0, 1)).to(dt_bias.dtype)
        return to_b, to_shifted.to(a.dtype), to_rate.to(a_log.dtype), to_bias


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        normed = _normed(x, eps)[0].mul_(widened(weight))
        return returned(normed.mul_(F.silu(widened(gate))).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        normed, scale = _normed(x, ctx.eps)
        wide = widened(gate)
        to_both = widened(grad) * normed
        to_gate = torch.ops.aten.silu_backward(to_both * widened(weight), wide)
        opened = F.silu(wide)
        to_weight = to_both.mul_(opened).sum(tuple(range(x.ndim - 1))).to(weight.dtype)
        del to_both, wide
        inner = opened.mul_(widened(grad)).mul_(widened(weight))
        along = (inner * normed).mean(-1, keepdim=True)
        inner.addcmul_(normed, along, value=-1).mul_(scale)
        return inner.to(x.dtype), to_gate.to(gate.dtype), to_weight, None


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x` `[..., dim]` divided by its root mean square, and the factor, in fp32 at least."""
    wide = widened(x)
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return wide * scale, scale
