"""Which of Meshwright's two families a model of Megatron's kind is, if any."""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.interop.source import ImportSource


class KeyValue(NamedTuple):
    """A key with its value, the other system's default where the file leaves it out."""

    key: str
    value: Any


class Traits(NamedTuple):
    """What tells the families apart; `heads` and `kv_heads` are numbers or None."""

    norm: KeyValue
    is_rms: bool
    activation: KeyValue
    is_gated: bool
    rotary: KeyValue
    parallel: KeyValue


def read_family(source: ImportSource, traits: Traits) -> str | None:
    """Take the keys that make a model Llama's kind or GPT-NeoX's, and return the family.

    Llama: RMSNorm, a gated MLP, all of a head rotated, no parallel residual. GPT-NeoX: LayerNorm
    and a plain MLP. A mixture is refused at the key that does not fit.
    """
    norm, activation = traits.norm, traits.activation
    if traits.is_rms != traits.is_gated:
        ours = "a gated MLP (swiglu, geglu)" if traits.is_rms else "a plain MLP (gelu, silu)"
        why = f"with {norm.value} Meshwright has {ours} only: model.family = llama or neox"
        source.refuse(activation.key, why, default=activation.value)
        source.honour(norm.key, note="one of two norms; the activation is not of its family")
        return None
    family = "llama" if traits.is_rms else "neox"
    if norm.key in source.values:
        source.translate(norm.key, {"model.family": family}, f"{norm.value} is {family}'s")
    else:
        source.fill("model.family", family, f"{norm.value} and {activation.value}")
    if family == "llama":
        if traits.parallel.value:
            why = "a parallel residual is of model.family = neox, which has LayerNorm"
            source.refuse(traits.parallel.key, why)
        if float(traits.rotary.value) != 1.0:
            why = "model.family = llama rotates whole heads; rotary_pct is neox's"
            source.refuse(traits.rotary.key, why)
        for choice in (traits.rotary, traits.parallel):
            source.honour(choice.key, note="as Llama does")
        return family
    _take(source, traits.rotary, "model.rotary_pct", float(traits.rotary.value))
    _take(source, traits.parallel, "model.parallel_residual", bool(traits.parallel.value))
    return family


def _take(source: ImportSource, choice: KeyValue, to: str, value: Any) -> None:
    if choice.key in source.values:
        source.honour(choice.key, {to: value})
    else:
        source.fill(to, value, f"the default of {choice.key}")
