"""The rule of frozen weights in four bits: whole blocks of 64 inputs on every rank."""

from __future__ import annotations

from meshwright.layout.layout import Layout
from meshwright.spec.lora import NF4_BLOCK
from meshwright.spec.model import ModelSpec

_WHY = "(lora.base = nf4)"


def nf4_rule(model: ModelSpec, layout: Layout) -> str | None:
    """Return the rule of NF4 weights that a layout breaks, or None.

    Blocks lie along the inputs of a layer, which tp cuts for the last layers of attention and MLP.
    """
    if model.lora is None or model.lora.base != "nf4":
        return None
    if model.experts:
        return f"model.experts = {model.experts} are not kept in four bits {_WHY}"
    if model.is_latent:
        return f"latent attention (model.kv_lora_rank) is not kept in four bits {_WHY}"
    if layout.offload == "params":
        return f"layout.offload = params cuts frozen weights, which four bits keep whole {_WHY}"
    if layout.zero == 3:
        return f"layout.zero = 3 cuts frozen weights, which four bits keep whole {_WHY}"
    values = model.n_heads * model.value_dim
    for name, inputs in (
        ("model.dim", model.dim),
        (f"model.n_heads x model.head_dim / layout.tp = {layout.tp}:", values // layout.tp),
        (f"model.ffn_dim / layout.tp = {layout.tp}:", model.ffn_dim // layout.tp),
    ):
        if inputs % NF4_BLOCK:
            term = f"{name} {inputs}" if name.endswith(":") else f"{name} = {inputs}"
            return f"{term} must be a multiple of {NF4_BLOCK} {_WHY}"
    return None
