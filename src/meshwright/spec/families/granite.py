"""Granite 3: Llama with constant multipliers (arXiv:2203.03466 is where they come from)."""

from __future__ import annotations

from typing import Any, Final

from meshwright.spec.families.base import (
    BIASES,
    Family,
    Key,
    llama_keys,
    llama_modules,
    preset,
    sizes_of,
)


def _granite(dim: int, heads: int, ffn: int, attention: float, logits: float) -> dict[str, Any]:
    return preset(
        "granite",
        *(49159, dim, 40, heads),
        n_kv_heads=8,
        ffn_dim=ffn,
        context=131072,
        rope_theta=1e7,
        tie_embeddings=True,
        embedding_scale=12.0,
        residual_scale=0.22,
        attention_scale=attention,
        logits_divisor=logits,
    )


MULTIPLIERS: Final = (
    Key("embedding_scale", "embedding_multiplier", "number", 1.0),
    Key("residual_scale", "residual_multiplier", "number", 1.0),
    Key("attention_scale", "attention_multiplier", "number", 1.0),
    Key("logits_divisor", "logits_scaling", "number", 1.0),
)

GRANITE: Final = Family(
    name="granite",
    model_type="granite",
    architecture="GraniteForCausalLM",
    modules=llama_modules(),
    sizes=sizes_of(32000, 4096, 11008, 32, 32, 2048),
    keys=(
        *llama_keys(),
        *BIASES,
        *MULTIPLIERS,
    ),
    free=frozenset({"attention_bias", "mlp_bias", *(key.ours for key in MULTIPLIERS)}),
    defaults={"attention_scale": 1.0},
    inert={"sliding_window": (), "hidden_dropout": (0.0,)},
    # HF configs of ibm-granite/granite-3.3-2b-instruct and -8b-instruct.
    presets={
        "granite-3.3-2b": _granite(2048, 32, 8192, 0.015625, 8.0),
        "granite-3.3-8b": _granite(4096, 32, 12800, 0.0078125, 16.0),
    },
)
