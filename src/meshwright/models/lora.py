"""Linear layers with low-rank adapters, LoRA: arXiv:2106.09685, section 4.1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.models.context import PLAIN, Context
from meshwright.models.dropout import dropout
from meshwright.models.nf4 import product
from meshwright.spec.lora import LINEAR, Lora
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import Linear

# The sites of a block's own dropout come before those of its adapters.
_FIRST_SITE: Final = 16


class LoraLinear(nn.Linear):
    """A linear layer whose weight is frozen, plus `scale * dropout(x) A' B'`.

    `lora_a` is `[rank, in]`, `lora_b` `[out, rank]`.
    """

    def __init__(self, inner: int, outer: int, lora: Lora, site: int, *, bias: bool) -> None:
        super().__init__(inner, outer, bias=bias)
        self.lora_a = nn.Parameter(torch.empty(lora.rank, inner))
        self.lora_b = nn.Parameter(torch.empty(outer, lora.rank))
        self.scale, self.p, self.site = lora.scale, lora.dropout, site
        # Tensor parallelism replaces it, by what gives this rank's part; `part` is which part of
        # the inputs that is, where it cuts them.
        self.local: Callable[[Tensor], Tensor] = lambda parameter: parameter
        self.part = 0

    def forward(self, input: Tensor, context: Context = PLAIN) -> Tensor:
        """Return the layer's output `[batch, seq, out]` for `input` `[batch, seq, in]`."""
        bias = None if self.bias is None else self.local(self.bias)
        out = product(self, input, self.local(self.weight), bias)
        return self.added(out, input, context, self.part * input.shape[-1])

    def added(self, out: Tensor, x: Tensor, context: Context, first: int = 0) -> Tensor:
        """Return `out` plus the adapter's output for `x`.

        `first` is the number of x's first input channel, where tensor parallelism splits the
        inputs: dropout masks depend on it.
        """
        if self.p > 0 and context.keys is not None and self.training:
            x = dropout(x, self.p, context.keys, context.positions, self.site, first)
        low = F.linear(F.linear(x, self.local(self.lora_a)), self.local(self.lora_b))
        return torch.add(out, low, alpha=self.scale)


def add_linears(module: nn.Module, spec: ModelSpec, linears: Iterable[Linear]) -> None:
    """Create a sublayer's linear layers as attributes, named by the last part of each linear's
    name.

    Layers that the model adapts are `LoraLinear`.
    """
    for name, (outer, _), (inner, _), bias in linears:
        if spec.lora is not None and name in spec.adapted:
            site = _FIRST_SITE + LINEAR.index(name)
            layer: nn.Linear = LoraLinear(inner, outer, spec.lora, site, bias=bias)
        else:
            layer = nn.Linear(inner, outer, bias=bias)
        setattr(module, name.rpartition(".")[2], layer)


def apply(layer: nn.Linear, x: Tensor, context: Context) -> Tensor:
    """Return the output of a linear layer for `x` `[batch, seq, in]`; only `LoraLinear` uses
    `context`.
    """
    out: Tensor = layer(x, context) if isinstance(layer, LoraLinear) else layer(x)
    return out


def freeze(model: nn.Module) -> None:
    """Set `requires_grad` to False for all parameters but LoRA's A and B."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((".lora_a", ".lora_b")))
