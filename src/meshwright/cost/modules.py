"""Selective recomputation of named parts of a layer, as Megatron-Core's `--recompute-modules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Final

from meshwright.cost.systems import Module
from meshwright.cost.work import Work
from meshwright.program.sizes import Sizes

# Products of a layer before those of its feed-forward: q, k, v and o.
_OF_ATTENTION: Final = 4


def hidden_bytes(sizes: Sizes, work: Work) -> float:
    """Return the bytes of the input of a layer's last matmul: the hidden activations of its MLP or
    experts."""
    last = work.products[-1]
    shared = sizes.tokens * sizes.shared_ffn if last.groups > 1 else 0
    return float((last.rows * last.inner + shared) * sizes.element)


def kept_without(
    modules: Set[Module], sizes: Sizes, work: Work, saved: Mapping[str, float]
) -> dict[str, float]:
    """Return the bytes that a layer saves, by kind, if the named modules are recomputed.

    Each module saves its input: `mlp` drops its activation and the input of the last matmul;
    `activation` keeps both of its inputs and drops its result; `layernorm` keeps the norm's input
    and drops the input of the following matmuls; `core_attn` keeps q, k and v and drops the scores.
    """
    remaining = dict(saved)
    # What experts' last product takes is made again anyway.
    hidden = 0.0 if work.products[-1].groups > 1 else hidden_bytes(sizes, work)
    hidden = min(hidden, remaining.get("product", 0.0))
    if "layernorm" in modules:
        remaining["product"] = hidden
    if modules & {"mlp", "activation"}:
        remaining["product"] = remaining.get("product", 0.0) - hidden
    if "mlp" in modules:
        remaining.pop("activation", None)
    if "core_attn" in modules:
        remaining.pop("scores", None)
    return remaining


def made_again(
    modules: Set[Module],
    work: Work,
    products: Sequence[float],
    attention: float,
    norms: float,
    activation: float,
) -> float:
    """Return the seconds of recomputing the named modules of a layer.

    `products` are the seconds of the layer's matmuls in order; `attention`, `norms` and
    `activation` those of its attention, all its norms and its activation.
    """
    seconds = attention if "core_attn" in modules else 0.0
    seconds += norms if "layernorm" in modules else 0.0
    seconds += activation if modules & {"mlp", "activation"} else 0.0
    if "mlp" in modules:
        seconds += sum(products[index] for index in range(_OF_ATTENTION, len(work.products)))
    return seconds
