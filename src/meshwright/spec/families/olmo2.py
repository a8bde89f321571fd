"""OLMo 2: norms after each sublayer in place of before, and over all heads of queries and keys.

arXiv:2501.00656.
"""

from __future__ import annotations

from typing import Any, Final

from meshwright.spec.families.base import (
    Family,
    Key,
    head_norms,
    llama_keys,
    llama_modules,
    preset,
    sizes_of,
)


def olmo_modules() -> dict[str, str]:
    """Return the stored name of each of our modules, with norms after each sublayer only."""
    names = llama_modules(**head_norms())
    for ours, hf_name in (("attn", "post_attention"), ("mlp", "post_feedforward")):
        del names[f"{ours}_norm"]
        names[f"{ours}_post_norm"] = f"model.layers.{{}}.{hf_name}_layernorm"
    return names


def _olmo2(dim: int, layers: int, heads: int, ffn: int, **fields: Any) -> dict[str, Any]:
    fields = {"n_kv_heads": heads} | fields
    return preset(
        "olmo2",
        *(100352, dim, layers, heads),
        ffn_dim=ffn,
        context=4096,
        rope_theta=500000.0,
        norm_eps=1e-6,
        **fields,
    )


OLMO2: Final = Family(
    name="olmo2",
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    modules=olmo_modules(),
    sizes=sizes_of(50304, 4096, 11008, 32, 32, 2048),
    keys=(*llama_keys(eps=1e-5), Key("attention_bias", "attention_bias", "flag", False)),
    free=frozenset({"attention_bias"}),
    fixed={"norm_placement": "after", "qk_norm": "all"},
    inert={"sliding_window": (), "hidden_dropout": (0.0,)},
    # arXiv:2501.00656, table 3, and the HF configs of allenai/OLMo-2-*.
    presets={
        "olmo-2-1b": _olmo2(2048, 16, 16, 8192),
        "olmo-2-7b": _olmo2(4096, 32, 32, 11008),
        "olmo-2-13b": _olmo2(5120, 40, 40, 13824),
        "olmo-2-32b": _olmo2(5120, 64, 40, 27648, n_kv_heads=8),
    },
)
