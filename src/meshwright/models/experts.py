"""A mixture of experts in place of one MLP: a router, the experts that it picks, a shared one.

arXiv:1701.06538, section 2. No token is dropped: each meets its `top_k` experts, however many other
tokens these have. The products are computed on tokens sorted by expert, and the backward is written
out: it keeps the projections of gate and up and which token met whom, and makes the rest again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.models.grouped import Sorted, products, weight_grads
from meshwright.models.mlp import GatedMLP
from meshwright.models.ops import activated, gated, through_activation, widened
from meshwright.spec.model import ModelSpec

Make = Callable[[], Tensor]
# A parameter, and what makes its gradient -> the gradient, None where it is made later
Gradient = Callable[[Tensor, Make], Tensor | None]
Edge = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """Return x."""
    return x


class Matrices(nn.Module):
    """Matrices with a backward that is written out: `[..., out, in]`.

    Parallelisms may replace `local`, which returns what this rank multiplies with, and `made`,
    which makes the gradient of that.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        self.local: Edge = same
        self.made: Gradient = lambda owner, make: make()

    def gradient(self, make: Make) -> Tensor | None:
        """Return the gradient, or None where it is made later."""
        return self.made(self.weight, make)


class Routing(NamedTuple):
    """The experts of each token: `ids` int64 and `shares` fp32, both `[tokens, top_k]`."""

    ids: Tensor
    shares: Tensor


class Router(Matrices):
    """Scores each expert for each token, and picks those with the largest softmax; in fp32."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec.experts, spec.dim)
        self.top_k, self.divides = spec.top_k, spec.norm_top_k

    def forward(self, x: Tensor) -> Routing:
        """Return the routing of tokens x `[tokens, dim]`."""
        shares, ids = _Route.apply(x, self.local(self.weight), self)  # type: ignore[no-untyped-call]
        return Routing(ids, shares)


class Experts(nn.Module):
    """Gated MLPs side by side: the sum of `share * down(act(gate(x)) * up(x))` over a token's."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        count, width = spec.experts, spec.expert_width
        self.gate = Matrices(count, width, spec.dim)
        self.up = Matrices(count, width, spec.dim)
        self.down = Matrices(count, spec.dim, width)
        self.act = spec.activation

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Return what the experts of each token make of it; x `[tokens, dim]`."""
        weights = [one.local(one.weight) for one in (self.gate, self.up, self.down)]
        out: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            x, routing, routing.shares, self, *weights
        )
        return out


class ExpertMLP(nn.Module):
    """Experts, and the shared one if there is one, in place of an MLP.

    `enter` and `leave` are what comes before and after the part that tensor parallelism cuts, as
    the experts' widths; the router is in it, on all tokens. Expert parallelism replaces `compute`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.router = Router(spec)
        self.experts = Experts(spec)
        width = spec.shared_ffn_dim
        self.shared = GatedMLP(spec, width) if width else None
        self.shared_gate = nn.Linear(spec.dim, 1, bias=False) if spec.shared_gate else None
        self.enter: Edge = same
        self.leave: Edge = same

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixture for x `[..., dim]`, of the same shape."""
        inside = self.enter(x)
        tokens = inside.flatten(0, -2)
        beside = None
        if self.shared is not None:
            beside = self.shared(tokens)
            if self.shared_gate is not None:
                beside = torch.sigmoid(self.shared_gate(tokens)) * beside
        out = self.compute(tokens, self.router(tokens))
        if beside is not None:
            out = out + beside
        return self.leave(out.view_as(inside))

    def compute(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return what the experts of each token make of it; tokens `[tokens, dim]`."""
        out: Tensor = self.experts(tokens, routing)
        return out


class _Route(torch.autograd.Function):
    """Scores, their softmax, the largest of it and their shares.

    Kept are the tokens, the softmax `[tokens, experts]` in fp32 and the ids.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        every = torch.softmax(widened(x) @ widened(weight).t(), -1)
        shares, ids = every.topk(router.top_k)
        ctx.save_for_backward(x, weight, every, ids)
        ctx.router = router
        ctx.mark_non_differentiable(ids)
        return shares / shares.sum(-1, keepdim=True) if router.divides else shares, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, every, ids = ctx.saved_tensors
        router: Router = ctx.router
        if router.divides:
            picked = every.gather(-1, ids)
            total = picked.sum(-1, keepdim=True)
            grad = (grad - (grad * picked).sum(-1, keepdim=True) / total) / total
        to_scores = torch.zeros_like(every).scatter_(-1, ids, grad)
        to_scores = torch._softmax_backward_data(to_scores, every, -1, every.dtype)
        to_x = (to_scores @ widened(weight)).to(x.dtype)
        to_weight = router.gradient(lambda: (to_scores.t() @ widened(x)).to(weight.dtype))
        return to_x, to_weight, None


class _Experts(torch.autograd.Function):
    """All experts' MLPs. A share multiplies what enters `down`: its gradient needs no result.

    Kept are the tokens, their shares, the pairs' order and the results of gate and up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        routing: Routing,
        shares: Tensor,
        module: Experts,
        *weights: Tensor,
    ) -> Tensor:
        gate, up, down = weights
        pairs, top_k = Sorted.of(routing.ids, len(gate)), shares.shape[-1]
        inputs, counts = x[pairs.tokens], pairs.counts
        gates, ups = products(inputs, gate, counts), products(inputs, up, counts)
        del inputs
        hidden = gated(gates, ups, module.act).mul_(pairs.sorted(shares)[:, None].to(x.dtype))
        ctx.save_for_backward(x, shares, *pairs, gates, ups, *weights)
        ctx.module = module
        return pairs.summed(products(hidden, down, counts), top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, shares, *places, gates, ups, gate, up, down = ctx.saved_tensors
        module: Experts = ctx.module
        pairs = Sorted(*places)
        counts, act = pairs.counts, module.act
        share = pairs.sorted(shares)[:, None].to(x.dtype)
        arriving = grad[pairs.tokens]
        to_hidden = products(arriving, down, counts, transposed=True)
        acts = activated(gates, act)
        entering = acts * ups
        to_share = (widened(to_hidden) * widened(entering)).sum(-1)[pairs.back].view_as(shares)
        entering.mul_(share)
        to_down = module.down.gradient(partial(weight_grads, arriving, entering, counts))
        del arriving, entering
        to_ups = acts.mul_(to_hidden.mul_(share))
        to_gates = through_activation(to_hidden.mul_(ups), gates, act)
        inputs = x[pairs.tokens]
        to_gate = module.gate.gradient(partial(weight_grads, to_gates, inputs, counts))
        to_up = module.up.gradient(partial(weight_grads, to_ups, inputs, counts))
        del inputs
        to_x = products(to_gates, gate, counts, transposed=True)
        to_x += products(to_ups, up, counts, transposed=True)
        total = pairs.summed(to_x, shares.shape[-1])
        return total, None, to_share, None, to_gate, to_up, to_down
