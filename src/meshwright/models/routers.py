"""The routers of mixtures of experts: each token's scores, its selected experts and their shares.

Each has a hand-written backward, which saves the tokens and their softmax or sigmoids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.models.balance import Balance, Sequences
from meshwright.models.ops import widened
from meshwright.spec.model import ModelSpec
from meshwright.torch_private import softmax_backward_data

Make = Callable[[], Tensor]
# A parameter, and what makes its gradient -> the gradient, None where it is made later
Gradient = Callable[[Tensor, Make], Tensor | None]
Edge = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """Return x unchanged."""
    return x


class Matrices(nn.Module):
    """Weight matrices `[..., out, in]` and biases `[..., out]` for modules with hand-written
    backwards.

    Parallelisms may replace `local`, which returns this rank's tensor of a parameter, and `made`,
    which computes a parameter's gradient or defers that.
    """

    bias: nn.Parameter | None

    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        self.bias = nn.Parameter(torch.empty(*shape[:-1])) if bias else None
        self.lora_a: nn.Parameter | None = None
        self.lora_b: nn.Parameter | None = None
        self.local: Edge = same
        self.made: Gradient = lambda owner, make: make()

    @property
    def used(self) -> tuple[Tensor, Tensor | None]:
        """This rank's weight and bias; the latter may be None."""
        return self.local(self.weight), None if self.bias is None else self.local(self.bias)

    def adapt(self, rank: int, which: Collection[str]) -> None:
        """Add LoRA matrices, both or one, as `which` says: A `[..., rank, in]`, B `[..., out,
        rank]`.
        """
        *outer, out, inner = self.weight.shape
        if "lora_a" in which:
            self.lora_a = nn.Parameter(torch.empty(*outer, rank, inner))
        if "lora_b" in which:
            self.lora_b = nn.Parameter(torch.empty(*outer, out, rank))

    def gradient(self, make: Make) -> Tensor | None:
        """Return the weight's gradient, which `make` computes, or None if it is computed later."""
        return self.made(self.weight, make)


class Routing(NamedTuple):
    """The experts of each token, `ids` int64, and their weights, `shares` fp32: `[tokens, top_k]`.

    If `drops`, ids that equal the number of experts are dropped: the expert was full.
    """

    ids: Tensor
    shares: Tensor
    drops: bool = False


class Router(Matrices):
    """A softmax router: selects each token's experts with the largest scores; computes in fp32.

    `balance` has its auxiliary losses and its capacity.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec.experts, spec.dim, bias=spec.expert_bias)
        self.top_k, self.divides = spec.top_k, spec.norm_top_k
        self.balance = Balance()

    def forward(self, x: Tensor, sequences: Sequences) -> Routing:
        """Return the routing of tokens x `[tokens, dim]`, which belong to `sequences`."""
        shares, ids = _Route.apply(x, *self.used, self, sequences)  # type: ignore[no-untyped-call]
        return Routing(ids, shares, drops=self.balance.capacity is not None)

    def margin(self, x: Tensor) -> Tensor:
        """Return how far the score of each token's last selected expert is above the next,
        `[tokens]`.

        x `[tokens, dim]`. Where the margin is within rounding, another implementation may select
        another expert.
        """
        weight, bias = self.used
        scores = widened(x) @ widened(weight).t()
        return _lead(scores if bias is None else scores + widened(bias), self.top_k)

    def bounded(self, ctx: Any, ids: Tensor, sequences: Sequences) -> Tensor:
        """Return ids with dropped pairs marked, if there is a capacity; sets `ctx.dropped` to their
        number.
        """
        ctx.dropped = None
        if self.balance.capacity is None:
            return ids
        limited = self.balance.bounded(ids, sequences, len(self.weight))
        ctx.dropped = sequences.data(limited == len(self.weight)).sum()
        return limited


class SigmoidRouter(Router):
    """A sigmoid router, whose correction per expert affects the selection, but not the shares.

    DeepSeek-V3, arXiv:2412.19437, section 2.1.2. Experts are selected from the groups with the
    largest sum of their two best scores. The correction is a buffer, fp32 `[experts]`.
    """

    correction: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.groups, self.top_groups = spec.expert_groups, spec.top_groups
        self.scale = spec.routed_scale
        self.register_buffer("correction", torch.zeros(spec.experts))

    def forward(self, x: Tensor, sequences: Sequences) -> Routing:
        """Return the routing of tokens x `[tokens, dim]`, which belong to `sequences`."""
        weight = self.local(self.weight)
        shares, ids = _RouteBySigmoid.apply(x, weight, self, sequences)  # type: ignore[no-untyped-call]
        return Routing(ids, shares, drops=self.balance.capacity is not None)

    def pick(self, scores: Tensor) -> Tensor:
        """Return the selected experts int64 `[tokens, top_k]` for scores `[tokens, experts]`."""
        if self.balance.is_forced:
            return self.balance.picked(scores, self.top_k)[1]
        return self._eligible(scores).topk(self.top_k).indices

    def margin(self, x: Tensor) -> Tensor:
        """Return how far each token's last selected expert, or group, is above the next,
        `[tokens]`.
        """
        scores = torch.sigmoid(widened(x) @ widened(self.local(self.weight)).t())
        lead = _lead(self._eligible(scores), self.top_k)
        if self.top_groups == self.groups:
            return lead
        groups = self._group_scores(scores + self.correction)
        return torch.minimum(lead, _lead(groups, self.top_groups))

    def _eligible(self, scores: Tensor) -> Tensor:
        """Return corrected scores `[tokens, experts]`, `-inf` outside of a token's best groups."""
        corrected = scores + self.correction
        if self.top_groups < self.groups:
            best = self._group_scores(corrected).topk(self.top_groups).indices
            by_group = corrected.view(len(corrected), self.groups, -1)
            eligible = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, True)
            corrected = by_group.masked_fill(~eligible[..., None], -torch.inf).flatten(-2)
        return corrected

    def _group_scores(self, corrected: Tensor) -> Tensor:
        """Return the sum of each group's two best scores, `[tokens, groups]`."""
        return corrected.view(len(corrected), self.groups, -1).topk(2).values.sum(-1)

    def to_even(self, scores: Tensor, sequences: Sequences) -> Tensor:
        """Return the gradient of the load-balancing loss with respect to scores, fp32 `[tokens,
        experts]`.

        A token counts for the experts with its largest scores, without corrections, and its
        probabilities are its scores divided by their sum.
        """
        total = scores.sum(-1, keepdim=True)
        shares = scores / total
        best = scores.topk(self.top_k).indices
        to_shares = torch.zeros_like(scores)
        sequences.add(self.balance.to_shares(shares, best, sequences), to_shares)
        return (to_shares - (to_shares * shares).sum(-1, keepdim=True)) / total

    @torch.no_grad()
    def correct(self, moves: Tensor) -> None:
        """Raise the correction of experts with fewer tokens than the mean by `rate`, lower the
        others'.

        arXiv:2408.15664, algorithm 1. `balance.lately` are the tokens per expert of the global
        batch; `moves` fp32 `[]` is 0 if the step changes no weights, else 1.
        """
        met = self.balance.lately
        assert met is not None
        towards = (met.sum() - met * len(met)).sign()  # of integers: as exact as the counts
        self.correction += self.balance.rate * (towards * moves)


def _lead(scores: Tensor, number: int) -> Tensor:
    """Return how far the `number`-th largest score exceeds the next; inf if that is the last."""
    if number == scores.shape[-1]:
        return torch.full_like(scores[:, 0], torch.inf)
    *_, last, following = scores.topk(number + 1).values.unbind(-1)
    return last - following


def router(spec: ModelSpec) -> Router:
    """Return a new router of the kind that the model uses: softmax or sigmoid."""
    return SigmoidRouter(spec) if spec.router_scores == "sigmoid" else Router(spec)


class _Route(torch.autograd.Function):
    """Autograd function of a softmax router: scores, softmax, selection and shares.

    Saved for the backward: the tokens, the softmax `[tokens, experts]` in fp32, the ids, and for
    the z-loss the log-sum-exp of each token's scores.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        router: Router,
        sequences: Sequences,
    ) -> tuple[Tensor, Tensor]:
        scores = widened(x) @ widened(weight).t()
        scores = scores if bias is None else scores + widened(bias)
        probabilities = torch.softmax(scores, -1)
        _, ids = router.balance.picked(probabilities, router.top_k)
        ids = router.balance.placed(ids, sequences, probabilities.shape[-1])
        shares = probabilities.gather(-1, ids)
        sizes = (scores.logsumexp(-1),) if router.balance.z else ()
        ctx.save_for_backward(x, weight, probabilities, ids, *sizes)
        ctx.router, ctx.sequences, ctx.has_bias = router, sequences, bias is not None
        ids = router.bounded(ctx, ids, sequences)
        ctx.mark_non_differentiable(ids)
        return shares / shares.sum(-1, keepdim=True) if router.divides else shares, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, probabilities, ids, *sizes = ctx.saved_tensors
        router: Router = ctx.router
        balance, sequences = router.balance, ctx.sequences
        if router.divides:
            picked = probabilities.gather(-1, ids)
            total = picked.sum(-1, keepdim=True)
            grad = (grad - (grad * picked).sum(-1, keepdim=True) / total) / total
        to_scores = torch.zeros_like(probabilities).scatter_(-1, ids, grad)
        balance.count(ids, sequences, probabilities.shape[-1], ctx.dropped)
        if balance.aux:
            sequences.add(balance.to_shares(probabilities, ids, sequences), to_scores)
        to_scores = softmax_backward_data(to_scores, probabilities, -1, probabilities.dtype)
        for size in sizes:
            to_scores.addcmul_(probabilities, balance.to_scores(size, sequences))
        to_x = (to_scores @ widened(weight)).to(x.dtype)
        to_weight = to_bias = None
        if ctx.needs_input_grad[1]:  # else it is frozen
            to_weight = router.gradient(lambda: (to_scores.t() @ widened(x)).to(weight.dtype))
            to_bias = to_scores.sum(0).to(weight.dtype) if ctx.has_bias else None
        return to_x, to_weight, to_bias, None, None


# Added to a sum of shares that is divided by, as in transformers.
_TINY: Final = 1e-20


class _RouteBySigmoid(torch.autograd.Function):
    """Autograd function of a sigmoid router: scores, sigmoids, selection and shares.

    Saved for the backward: the tokens, the sigmoids `[tokens, experts]` in fp32 and the ids.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, router: SigmoidRouter, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        sigmoids = torch.sigmoid(widened(x) @ widened(weight).t())
        ids = router.balance.placed(router.pick(sigmoids), sequences, sigmoids.shape[-1])
        shares = sigmoids.gather(-1, ids)
        ctx.save_for_backward(x, weight, sigmoids, ids)
        ctx.router, ctx.sequences = router, sequences
        ids = router.bounded(ctx, ids, sequences)
        ctx.mark_non_differentiable(ids)
        if router.divides:
            shares = shares / (shares.sum(-1, keepdim=True) + _TINY)
        return shares * router.scale, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, sigmoids, ids = ctx.saved_tensors
        router: SigmoidRouter = ctx.router
        router.balance.count(ids, ctx.sequences, sigmoids.shape[-1], ctx.dropped)
        grad = grad * router.scale
        picked = sigmoids.gather(-1, ids)
        if router.divides:
            total = picked.sum(-1, keepdim=True) + _TINY
            grad = (grad - (grad * picked).sum(-1, keepdim=True) / total) / total
        to_sigmoids = torch.zeros_like(sigmoids).scatter_(-1, ids, grad)
        if router.balance.aux:
            to_sigmoids += router.to_even(sigmoids, ctx.sequences)
        to_scores = to_sigmoids * sigmoids * (1 - sigmoids)
        to_x = (to_scores @ widened(weight)).to(x.dtype)
        to_weight = None
        if ctx.needs_input_grad[1]:  # else it is frozen
            to_weight = router.gradient(lambda: (to_scores.t() @ widened(x)).to(weight.dtype))
        return to_x, to_weight, None, None
