"""Mamba-2, a recurrent layer in place of attention: arXiv:2405.21060, section 7.

Values x and the queries and keys of groups of heads, C and B, pass a short causal convolution and a
SiLU, then the recurrence of `models.state_space`; its result is multiplied by the SiLU of a gate z
and normalized by group. What is around the recurrence has hand-written backwards, which save what
each takes and nothing else.
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
from meshwright.models.lora import add_linears
from meshwright.models.ops import returned, widened
from meshwright.models.short_conv import ShortConv, Taps, convolve, last_tokens
from meshwright.models.state_space import STATE_SPACE
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import mamba_linears

Limits = tuple[float, float] | None
"""The least and the largest step of a token; None: any."""

Sums = Callable[[Tensor], Tensor]
"""Completes sums over a group's features `[..., groups]`, of which a rank may have a part."""


class GroupNorm(nn.Module):
    """An RMSNorm of each group of features, of these times the SiLU of a gate.

    Tensor parallelism replaces `sums` where a group's features are on several ranks, and `local`,
    which returns this rank's part of a parameter. `size` is the whole group's.
    """

    def __init__(self, dim: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.size, self.eps = dim // groups, eps
        self.sums: Sums | None = None

    def forward(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of `x * silu(gate)` `[..., dim]`, times a rank's part of the weight."""
        out: Tensor = _GroupNorm.apply(x, gate, weight, self.size, self.eps, self.sums)  # type: ignore[no-untyped-call]
        return out


class Mamba2(nn.Module):
    """Projections `z`, `x`, `bc`, `dt` and `out` around the state-space recurrence.

    `bc` has the keys B of all groups, then their queries C. Tensor parallelism may replace
    `project`, which computes all but `out`, `local`, which returns this rank's part of a parameter,
    and `groups`, the first group of this rank's heads and how many these are in: it computes B and
    C of all; context parallelism replaces `convolve` and `recur`, which continue earlier tokens. A
    cache holds the last state, and what the convolution still needs.
    """

    z: nn.Linear
    x: nn.Linear
    bc: nn.Linear
    dt: nn.Linear
    out: nn.Linear

    def __init__(self, spec: ModelSpec, layer: str) -> None:
        super().__init__()
        self.head_dim, self.state = spec.mamba_head_dim, spec.mamba_state
        values = spec.mamba_heads * spec.mamba_head_dim
        self.a_log = nn.Parameter(torch.empty(spec.mamba_heads))
        self.dt_bias = nn.Parameter(torch.empty(spec.mamba_heads))
        self.skip = nn.Parameter(torch.empty(spec.mamba_heads))
        add_linears(self, spec, mamba_linears(spec))
        self.x_conv = ShortConv(values, spec.mamba_kernel)
        self.bc_conv = ShortConv(2 * spec.mamba_groups * spec.mamba_state, spec.mamba_kernel)
        self.gated_norm = GroupNorm(values, spec.mamba_groups, spec.norm_eps)
        self.limits: Limits = spec.mamba_dt_limit
        self.groups = 0, spec.mamba_groups
        self.layer = layer
        self.project: Project = each
        self.local: Callable[[Tensor], Tensor] = lambda parameter: parameter
        self.convolve, self.recur = convolve, recur

    def forward(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        """Return the layer's result for x `[batch, seq, dim]`, of the same shape."""
        layers = self.z, self.x, self.bc, self.dt
        z, values, bc, dt = self.project(x, layers, context)
        a_log, dt_bias, skip = map(self.local, (self.a_log, self.dt_bias, self.skip))
        step, decay = steps(dt, a_log, dt_bias, self.limits)
        del dt
        segments, states = context.documents, kept_by(context.cache, self.layer, 3)
        inputs = values, self._of_groups(bc, 2)
        del values, bc
        weights = self.local(self.x_conv.weight), self._of_groups(self.bc_conv.weight, 0)
        biases = self.local(self.x_conv.bias), self._of_groups(self.bc_conv.bias, 0)
        taps = [Taps(*given) for given in zip(inputs, weights, biases, states[:2], strict=True)]
        v, kq = self.convolve(taps, segments)
        k, q = torch.unflatten(kq, 2, (2, -1, self.state)).unbind(2)
        v = torch.unflatten(v, 2, (-1, self.head_dim))
        read, last = self.recur(STATE_SPACE, (q, k, v, decay, step, skip), segments, states[2])
        del q, k, kq, v
        if context.cache is not None:
            count = self.x_conv.weight.shape[-1] - 1
            tails = [last_tokens(tap.x, tap.before, count) for tap in taps]
            context.cache.keep(self.layer, (*tails, last))
        del inputs, taps
        normed = self.gated_norm(read.flatten(2), z, self.local(self.gated_norm.weight))
        result: Tensor = self.out(normed)
        return result

    def _of_groups(self, x: Tensor, dim: int) -> Tensor:
        """Return the part of this rank's groups of a dim that has B and C of all groups."""
        first, count = self.groups
        by_group = torch.unflatten(x, dim, (2, -1, self.state))
        if by_group.shape[dim + 1] == count:
            return x
        return by_group.narrow(dim + 1, first, count).flatten(dim, dim + 2)


def steps(dt: Tensor, a_log: Tensor, dt_bias: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Return the steps of tokens, and the logarithms of decays, in fp32 `[batch, seq, heads]`.

    dt `[batch, seq, heads]`; a_log and dt_bias `[heads]`. arXiv:2405.21060, section 7.1.
    """
    out: tuple[Tensor, Tensor] = _Steps.apply(dt, a_log, dt_bias, limits)  # type: ignore[no-untyped-call]
    return out


class _Steps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dt: Tensor, a_log: Tensor, dt_bias: Tensor, limits: Limits
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(dt, a_log, dt_bias)
        ctx.limits = limits
        step = F.softplus(widened(dt) + widened(dt_bias))
        if limits is not None:
            step.clamp_(*limits)
        return step, step * -widened(a_log).exp()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_step: Tensor, to_decay: Tensor) -> tuple[Tensor | None, ...]:
        dt, a_log, dt_bias = ctx.saved_tensors
        shifted, rate = widened(dt) + widened(dt_bias), -widened(a_log).exp()
        step = F.softplus(shifted)
        to_shifted = (to_step + to_decay * rate).mul_(torch.sigmoid(shifted))
        if ctx.limits is not None:
            shortest, longest = ctx.limits
            to_shifted *= (step >= shortest) & (step <= longest)
            step.clamp_(shortest, longest)
        to_rate = (to_decay * step).sum((0, 1)) * rate
        to_bias = to_shifted.sum((0, 1)).to(dt_bias.dtype)
        return to_shifted.to(dt.dtype), to_rate.to(a_log.dtype), to_bias, None


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, size: int, eps: float, sums: Sums | None
    ) -> Tensor:
        gated = _by_group(widened(x) * F.silu(widened(gate)), size)
        squares = gated.square().sum(-1)
        scales = (squares if sums is None else sums(squares)).div(size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gate, weight, scales)
        ctx.size, ctx.sums = size, sums
        normed = gated.mul_(scales[..., None]).flatten(-2)
        return returned(normed.mul_(widened(weight)).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, scales = ctx.saved_tensors
        wide = widened(gate)
        opened = F.silu(wide)
        normed = _by_group(widened(x) * opened, ctx.size).mul_(scales[..., None])
        inner = widened(grad) * normed.flatten(-2)
        to_weight = inner.sum(tuple(range(x.ndim - 1))).to(weight.dtype)
        del inner
        inner = _by_group(widened(grad) * widened(weight), ctx.size)
        along = (inner * normed).sum(-1)
        along = (along if ctx.sums is None else ctx.sums(along)).div(ctx.size)
        inner.addcmul_(normed, along[..., None], value=-1).mul_(scales[..., None])
        del normed
        to_gated = inner.flatten(-2)
        to_x = opened.mul_(to_gated).to(x.dtype)
        to_gate = torch.ops.aten.silu_backward(to_gated.mul_(widened(x)), wide)
        return to_x, to_gate.to(gate.dtype), to_weight, None, None, None


def _by_group(x: Tensor, size: int) -> Tensor:
    """Return features `[..., dim]` as `[..., groups, features]`; a part of one group as it is."""
    return torch.unflatten(x, -1, (-1, min(size, x.shape[-1])))
