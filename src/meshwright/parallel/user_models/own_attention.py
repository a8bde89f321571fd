"""Context parallelism of a user's model: its attention sees the whole sequence.

Each rank computes its shard of the tokens, and `Ring` or `Ulysses` replaces
`F.scaled_dot_product_attention`. Calls that they don't support are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from meshwright.comm.groups import Link
from meshwright.errors import ConfigError, nearest_divisors, refusal
from meshwright.kernels.varlen import attend_varlen
from meshwright.layout import Layout
from meshwright.parallel.context_parallel.context import Ring, Ulysses
from meshwright.parallel.user_models.following import Following

_HINT = (
    "Causal attention over the whole row needs is_causal=True and no mask. transformers makes a "
    "mask of positions with gaps where use_cache is off: pass "
    "attention_mask=torch.ones_like(input_ids). Packed documents, padding and windows need "
    "`meshwright train`, or layout.cp = 1"
)


class Call(NamedTuple):
    """The arguments of `F.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class Watch(Protocol):
    """A function that gets a call of attention in place of its execution."""

    def __call__(self, call: Call, attend: Callable[[Call], Tensor]) -> Tensor:
        """Return the result of the attention call; `attend` executes it over cp."""


class OwnAttention(Following):
    """Replaces attention in a user's modules by attention over the ranks of cp.

    `watch`, if set, gets each call in place of its execution.
    """

    def __init__(self, layout: Layout, link: Link) -> None:
        super().__init__()
        is_ring = layout.cp_kind == "ring"
        group = link.required
        self._core = Ring(group) if is_ring else Ulysses(group, attend_varlen)
        self._is_ring, self._size, self._tp = is_ring, link.size, layout.tp
        self._has_gradients = False
        self.watch: Watch | None = None

    def follow_all(self, model: nn.Module) -> None:
        """Activate the mode in each module, because recomputation may run any of them on its own.

        Raises `ConfigError` for `nn.MultiheadAttention`.
        """
        for name, module in model.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                raise ConfigError(
                    f"layout.cp = {self._size} cannot cut the attention of {name}, a torch "
                    "nn.MultiheadAttention: call F.scaled_dot_product_attention(q, k, v, "
                    "is_causal=True) in its place"
                )
            if not type(module).__module__.startswith("torch."):
                self.follow(module)

    def begin(self) -> None:
        """Record whether the forward computes gradients."""
        self._has_gradients = torch.is_grad_enabled()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator; `scaled_dot_product_attention` runs over all ranks of cp."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        call = Call(*args, **(kwargs or {}))
        return self._attend(call) if self.watch is None else self.watch(call, self._attend)

    def _attend(self, call: Call) -> Tensor:
        wrong = self.refused(call)
        if wrong is not None:
            raise ConfigError(wrong)
        query, scale = call.query, call.query.shape[-1] ** -0.5
        if call.scale is not None and call.scale != scale:
            query = query * (call.scale / scale)
        return _operator(query, call.key, call.value, self._core)

    def refused(self, call: Call) -> str | None:
        """Return why a call is not causal attention over the whole sequence, or None if it is."""
        cp, q, k, v = self._size, *call[:3]
        unsupported = {
            "a mask": call.attn_mask is not None,
            f"dropout ({call.dropout_p:g}) in attention": call.dropout_p > 0,
            "attention that is not causal": call.attn_mask is None and not call.is_causal,
            f"shapes {[list(x.shape) for x in (q, k, v)]} of queries, keys and values, where "
            "[batch, heads, tokens, head_dim] with as many queries as keys is needed": (
                q.dim() != 4
                or k.shape != v.shape
                or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:])
                or q.shape[1] % k.shape[1] != 0
            ),
        }
        wrong = next((feature for feature, is_asked in unsupported.items() if is_asked), None)
        if wrong is not None:
            return f"layout.cp = {cp} does not allow {wrong}. {_HINT}"
        if self._has_gradients and not torch.is_grad_enabled():
            return (
                f"layout.cp = {cp}: attention is computed under no_grad in a forward that has "
                "gradients, as checkpoint(..., use_reentrant=True) does. Use layout.recompute, or "
                "use_reentrant=False"
            )
        if self._is_ring and q.shape[2] % 2:
            return (
                f"layout.cp_kind = ring needs an even number of tokens on each rank, not "
                f"{q.shape[2]}: cut rows by meshwright.positions(layout, seq_len)"
            )
        if not self._is_ring and k.shape[1] % cp:
            legal = [f"layout.cp = {n}" for n in nearest_divisors(k.shape[1], cp)]
            rule = (
                f"layout.cp = {cp} must divide the {k.shape[1]} heads of keys that a rank has with "
                f"layout.tp = {self._tp} (layout.cp_kind = ulysses)"
            )
            return refusal(rule, legal=["layout.cp_kind = ring", *legal])
        return None


def _operator(query: Tensor, key: Tensor, value: Tensor, core: Callable[..., Tensor]) -> Tensor:
    """Run `core` so that other torch function modes, such as tp's, see one operator."""
    if has_torch_function((query, key, value)):
        handled: Tensor = handle_torch_function(
            _operator, (query, key, value), query, key, value, core
        )
        return handled
    out: Tensor = _Marked.apply(core(query, key, value))  # type: ignore[no-untyped-call]
    return out


class _Marked(torch.autograd.Function):
    """The identity, which saves one more tensor for the backward.

    A recomputation that reaches attention outside of any registered module would attend to its own
    rank's tokens only. Torch refuses it, since it then saves fewer tensors than the forward did.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
