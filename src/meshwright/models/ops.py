"""RMSNorm, rotation and gated activations with hand-written backwards.

Eager PyTorch runs them as chains of small operations that save several copies for the backward. On
a CPU, the first two take a third and a half of the time, and save one copy at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
_APPROXIMATE: Final[Mapping[Activation, str]] = {"gelu": "none", "gelu_tanh": "tanh"}


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """Return `x / rms(x) * weight` over the last dim of x `[..., dim]`, computed in fp32 at least.

    With `plus_one`, the factor is `1 + weight`. The result has the dtype of `x`. arXiv:1910.07467,
    equation 4.
    """
    if x.device.type == "cuda":  # has a fused kernel
        if plus_one:  # in fp32: the sum would lose most of a small weight
            return F.rms_norm(x.float(), (x.shape[-1],), 1 + weight.float(), eps).to(x.dtype)
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)
    out: Tensor = _RMSNorm.apply(x, weight, eps, plus_one)  # type: ignore[no-untyped-call]
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, is_adjacent: bool = False) -> Tensor:
    """Apply rotary embeddings to the first `rotary_dim` dims of each head, in fp32 at least.

    x `[batch, heads, seq, head_dim]`; cos and sin fp32 `[seq, rotary_dim]`, or `[batch, 1, seq,
    rotary_dim]` where they differ by sequence, both halves equal. Dim i is paired with i +
    rotary_dim/2, as in GPT-NeoX and transformers, or with `is_adjacent` dim 2i with 2i + 1, as in
    arXiv:2104.09864, equation 34.
    """
    out: Tensor = _Rotate.apply(x, cos, sin, is_adjacent)  # type: ignore[no-untyped-call]
    return out


def activated(x: Tensor, name: Activation) -> Tensor:
    """Return the activation `name` of `x`, elementwise."""
    if name == "silu":
        return F.silu(x)
    if name == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate=_APPROXIMATE[name])


def gated(gate: Tensor, up: Tensor, name: Activation) -> Tensor:
    """Return `activated(gate) * up` of tensors of one shape, saving only both for the backward.

    The activation is recomputed in the backward, as arXiv:2410.10989, section 3.2, does on a GPU.
    """
    out: Tensor = _Gated.apply(gate, up, name)  # type: ignore[no-untyped-call]
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, name: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.name = name
        return returned(activated(gate, name).mul_(up))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        to_gate = through_activation(grad * up, gate, ctx.name)
        return to_gate, activated(gate, ctx.name).mul_(grad), None


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x * sigmoid(gate)` of tensors of one shape, saving only both for the backward."""
    out: Tensor = _SigmoidGated.apply(x, gate)  # type: ignore[no-untyped-call]
    return out


class _SigmoidGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return returned(torch.sigmoid(gate).mul_(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        share = torch.sigmoid(gate)
        to_gate = grad * x
        to_gate.mul_(share).mul_(1 - share)
        return share.mul_(grad), to_gate


class Glu(NamedTuple):
    """The activation of a gated MLP: `activated(gate) * up`.

    With a `limit`, it is `(up + 1) * gate * sigmoid(alpha * gate)`, where gate is clamped to at
    most `limit` and up to `-limit` .. `limit`, as in gpt-oss.
    """

    name: Activation
    limit: float | None = None
    alpha: float = 1.0

    def of(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the gated activation of two tensors of one shape, in new memory."""
        return self.gate(gate).mul_(self.up(up))

    def gate(self, x: Tensor) -> Tensor:
        """Return the factor that depends on the gate's projection x, in new memory."""
        if self.limit is None:
            return activated(x, self.name)
        bounded = x.clamp(max=self.limit)
        return torch.sigmoid(bounded * self.alpha).mul_(bounded)

    def up(self, x: Tensor) -> Tensor:
        """Return the factor that depends on the up projection x."""
        return x if self.limit is None else x.clamp(-self.limit, self.limit).add_(1)

    def through_gate(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient for x, from `grad`, that for `gate(x)`, in whose memory it is."""
        if self.limit is None:
            return through_activation(grad, x, self.name)
        share = torch.sigmoid(x * self.alpha)
        slope = (1 - share).mul_(x).mul_(self.alpha).add_(1).mul_(share)
        return grad.mul_(slope).masked_fill_(x > self.limit, 0)

    def through_up(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient for x, from `grad`, that for `up(x)`, in whose memory it is."""
        return grad if self.limit is None else grad.masked_fill_(x.abs() > self.limit, 0)


def through_activation(grad: Tensor, x: Tensor, name: Activation) -> Tensor:
    """Return the gradient for x, from `grad`, that for `activated(x)`, in whose memory it is."""
    aten = torch.ops.aten
    if name == "silu":
        aten.silu_backward.grad_input(grad, x, grad_input=grad)
    elif name == "relu2":
        grad.mul_(F.relu(x)).mul_(2)
    else:
        aten.gelu_backward.grad_input(grad, x, approximate=_APPROXIMATE[name], grad_input=grad)
    return grad


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
        wide = widened(x)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.plus_one = plus_one
        return returned((wide * scale).mul_(factor(weight, plus_one)).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = widened(x) * scale
        wide = widened(grad)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = (wide * normed).sum(tuple(range(x.ndim - 1))).to(weight.dtype)
        inner = wide * factor(weight, ctx.plus_one)
        del wide  # a copy in half precision
        along = (inner * normed).mean(-1, keepdim=True)
        inner.addcmul_(normed, along, value=-1).mul_(scale)
        return inner.to(x.dtype), weight_grad, None, None


def factor(weight: Tensor, plus_one: bool) -> Tensor:
    """Return the factor of an RMSNorm: its weight, or `1 + weight` in fp32 with `plus_one`."""
    return 1 + widened(weight) if plus_one else weight


def softcapped(x: Tensor, cap: float | None) -> Tensor:
    """Return `cap * tanh(x / cap)`, or x without a cap. arXiv:2408.00118, section 2."""
    return x if cap is None else torch.tanh(x / cap) * cap


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, is_adjacent: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turn = _turn_adjacent if is_adjacent else _turn
        return returned(ctx.turn(x, cos, sin, 1.0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return ctx.turn(grad, cos, sin, -1.0), None, None, None


def returned(x: Tensor) -> Tensor:
    """Return a view of x, the result of a Function's forward that was written in place.

    torch 2.11's compiler passes zeros to the backward of such a result, silently, unless it is a
    view (github.com/pytorch/pytorch/issues/180642; fixed in 2.12).
    """
    return x.view_as(x)


def widened(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    wide = widened(x)
    rotary, half = cos.shape[-1], cos.shape[-1] // 2
    if rotary == x.shape[-1]:
        turned = wide * cos
    else:
        turned = wide.clone()
        turned[..., :rotary].mul_(cos)
    turned[..., :half].addcmul_(wide[..., half:rotary], sin[..., :half], value=-sign)
    turned[..., half:rotary].addcmul_(wide[..., :half], sin[..., :half], value=sign)
    return turned.to(x.dtype)


def _turn_adjacent(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Return heads rotated by pairs of dims that follow each other."""
    wide = widened(x)
    rotary, half = cos.shape[-1], cos.shape[-1] // 2
    turned = wide.clone()
    first, second = wide[..., :rotary:2], wide[..., 1:rotary:2]
    cos, sin = cos[..., :half], sin[..., :half]
    turned[..., :rotary:2].mul_(cos).addcmul_(second, sin, value=-sign)
    turned[..., 1:rotary:2].mul_(cos).addcmul_(first, sin, value=sign)
    return turned.to(x.dtype)
