"""A mixture of experts instead of one MLP: a router, routed experts and maybe a shared expert.

arXiv:1701.06538, section 2. Without a capacity, no token is dropped: each is processed by its
`top_k` experts, whatever their load. Matmuls run on tokens sorted by expert. The backward is
written by hand: it saves the outputs of gate and up and the routing, and recomputes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.models.balance import Sequences
from meshwright.models.context import PLAIN, Context
from meshwright.models.expert_adapters import added, gradients, named, through
from meshwright.models.grouped import (
    Sorted,
    dots,
    products,
    rows_again,
    spread,
    sums,
    weight_grads,
)
from meshwright.models.mlp import MLP
from meshwright.models.ops import Glu, widened
from meshwright.models.routers import Edge, Make, Matrices, Routing, router, same
from meshwright.spec.lora import DOWN, JOINED, JOINT, matrices
from meshwright.spec.model import ModelSpec


class Experts(nn.Module):
    """The routed experts: for each token, the sum of `share * down(act(gate(x), up(x)))` over its
    experts.

    Each expert is a gated MLP; `gate`, `up` and `down` have the matrices of all. Tensor parallelism
    may set `adds` to False on ranks that leave the bias of `down` to another rank.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        count, width, bias = spec.experts, spec.expert_width, spec.expert_bias
        self.gate = Matrices(count, width, spec.dim, bias=bias)
        self.up = Matrices(count, width, spec.dim, bias=bias)
        self.down = Matrices(count, spec.dim, width, bias=bias)
        self.act = Glu(spec.activation, spec.swiglu_limit, spec.swiglu_alpha)
        self.adds = True
        self.scale, self.adapters = 1.0, _adapters(spec)
        if spec.lora is None:
            return
        self.scale = spec.lora.scale
        for projection, name in ((self.gate, JOINED[0]), (self.up, JOINED[1]), (self.down, DOWN)):
            projection.adapt(spec.lora.rank, matrices(spec.adapted, name))

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Return, for each token of `x` `[tokens, dim]`, its experts' outputs weighted by their
        shares.
        """
        weights, biases = zip(
            *(projection.used for projection in (self.gate, self.up, self.down)), strict=True
        )
        low = [matrix for names in self.adapters for matrix in self._low(names)]
        out: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            x, routing, routing.shares, self, *weights, *biases, *low
        )
        return out

    def _low(self, names: Sequence[str]) -> list[Tensor]:
        """Return this rank's LoRA matrices of projections: their A, then the B of each."""
        projections: list[Matrices] = [getattr(self, name) for name in names]
        adapter = (projections[0].lora_a, *(projection.lora_b for projection in projections))
        return [projections[0].local(matrix) for matrix in adapter if matrix is not None]


def _adapters(spec: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Return, for each LoRA adapter of the experts, the names of its projections, in order."""
    if JOINT in spec.adapted:
        names: list[tuple[str, ...]] = [("gate", "up")]
    else:
        names = [(name.rsplit(".", 1)[1],) for name in JOINED if name in spec.adapted]
    return (*names, *([("down",)] if DOWN in spec.adapted else []))


class ExpertMLP(nn.Module):
    """A mixture-of-experts sublayer: a router, routed experts, and maybe a shared expert.

    Tensor parallelism splits the experts' widths; `enter` and `leave` are its collectives before
    and after that part of the computation, which includes the router (on all tokens). If it `folds`
    (see `parallel.tensor_parallel`), only the shared expert is split this way. Expert parallelism
    replaces `begin`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.router = router(spec)
        self.experts = Experts(spec)
        self.shared = MLP(spec, "mlp.shared") if spec.shared_ffn_dim else None
        self.shared_gate = nn.Linear(spec.dim, 1, bias=False) if spec.shared_gate else None
        self.enter: Edge = same
        self.leave: Edge = same
        self.folds = False

    def forward(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        """Return the sublayer's output for `x` `[..., dim]`, of the same shape."""
        routed = x if self.folds else self.enter(x)
        tokens = routed.flatten(0, -2)
        sequences = Sequences.of(len(routed) if routed.dim() > 2 else 1, context.unpadded)
        results = self.begin(tokens, self.router(tokens, sequences))
        shared = self._beside(routed, context)
        out = results().view_as(routed)
        if self.folds:
            return out if shared is None else out + self.leave(shared)
        return self.leave(out if shared is None else out + shared)

    def _beside(self, x: Tensor, context: Context) -> Tensor | None:
        """Return the shared expert's output for tokens x, or None if the layer has no shared
        expert.
        """
        if self.shared is None:
            return None
        inside = self.enter(x) if self.folds else x
        shared: Tensor = self.shared(inside, context)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(inside)) * shared
        return shared

    def begin(self, tokens: Tensor, routing: Routing) -> Make:
        """Start the routed experts of tokens `[tokens, dim]`; return a function that returns their
        output.

        The shared expert runs before that function is called, so it may overlap with communication.
        """
        return partial(self.experts, tokens, routing)


class _Experts(torch.autograd.Function):
    """Autograd function of all experts' MLPs. Shares multiply the input of `down`.

    So the gradient of a share does not need the output of `down`. Saved for the backward: the
    tokens, their shares, the order of (token, expert) pairs, the outputs of gate and up, and `rows
    A'` of each adapter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        routing: Routing,
        shares: Tensor,
        module: Experts,
        *operands: Tensor | None,
    ) -> Tensor:
        (gate, up, down, gate_bias, up_bias, bias), low = operands[:6], operands[6:]
        assert gate is not None
        assert up is not None
        assert down is not None
        pairs, top_k = Sorted.of(routing.ids, len(gate), drops=routing.drops), shares.shape[-1]
        inputs, counts = x[pairs.tokens], pairs.counts
        projected = {
            "gate": products(inputs, gate, counts, bias=gate_bias),
            "up": products(inputs, up, counts, bias=up_bias),
        }
        adapters = named(module.adapters, low, module.scale)
        lows = added(adapters, projected, inputs, counts)
        del inputs
        share = pairs.sorted(shares)[:, None].to(x.dtype)
        hidden = module.act.of(projected["gate"], projected["up"]).mul_(share)
        results = products(hidden, down, counts)
        lows += added(adapters, {"down": results}, hidden, counts)
        if bias is not None and module.adds:
            results.add_(spread(bias, counts, len(results)).mul_(share))
        saved = x, shares, *pairs, *projected.values(), gate, up, down, bias
        ctx.save_for_backward(*saved, *low, *lows)
        ctx.module, ctx.low = module, len(low)
        return pairs.summed(results, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: they may be computed again for it
        x, shares, *places, gates, ups, gate, up, down, bias = saved[:11]
        module: Experts = ctx.module
        pairs = Sorted(*places)
        counts, act, is_trained = pairs.counts, module.act, ctx.needs_input_grad[4]
        adapters = named(module.adapters, saved[11 : 11 + ctx.low], module.scale)
        lows = list(zip(adapters, saved[11 + ctx.low :], strict=True))
        first, last = (
            [pair for pair in lows if (pair[0].names == ("down",)) == is_last]
            for is_last in (False, True)
        )
        to_gate = to_up = to_down = None
        share = pairs.sorted(shares)[:, None].to(x.dtype)
        arriving = grad[pairs.tokens]
        to_hidden = products(arriving, down, counts, transposed=True)
        low_of_down = through(last, {"down": arriving}, to_hidden, counts)
        acts = act.gate(gates)
        entering = acts * act.up(ups)
        to_share = (widened(to_hidden) * widened(entering)).sum(-1)
        to_bias = None if bias is None else torch.zeros_like(bias)
        if bias is not None and module.adds:
            to_share += dots(arriving, bias, counts)
            to_bias = sums(arriving, share[:, 0], counts) if is_trained else None
        to_share = pairs.of_tokens(to_share).view_as(shares)
        entering.mul_(share)
        to_low_of_down = gradients(low_of_down, entering, counts)
        if is_trained:
            to_down = module.down.gradient(partial(weight_grads, arriving, entering, counts))
        del arriving, entering
        to_ups = act.through_up(acts.mul_(to_hidden.mul_(share)), ups)
        to_gates = act.through_gate(to_hidden.mul_(act.up(ups)), gates)
        if is_trained:
            inputs = rows_again(x, pairs.tokens, to_gates)
            to_gate = module.gate.gradient(partial(weight_grads, to_gates, inputs, counts))
            to_up = module.up.gradient(partial(weight_grads, to_ups, inputs, counts))
            del inputs
        to_x = products(to_gates, gate, counts, transposed=True)
        to_x += products(to_ups, up, counts, transposed=True)
        adapter_grads = through(first, {"gate": to_gates, "up": to_ups}, to_x, counts)
        to_low = (
            gradients(adapter_grads, rows_again(x, pairs.tokens, to_x), counts)
            if adapter_grads
            else []
        )
        total = pairs.summed(to_x, shares.shape[-1])
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if bias is not None and is_trained:
            ones = torch.ones_like(share[:, 0])
            biases = sums(to_gates, ones, counts), sums(to_ups, ones, counts), to_bias
        weights = to_gate, to_up, to_down
        return total, None, to_share, None, *weights, *biases, *to_low, *to_low_of_down
