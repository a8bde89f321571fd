"""Mistral: Llama without biases, and with a window in all layers or in none. arXiv:2310.06825."""

from __future__ import annotations

from typing import Final

from meshwright.spec.families.base import (
    Family,
    llama_keys,
    llama_modules,
    preset,
    sizes_of,
)
from meshwright.spec.families.layers import LayerKeys

MISTRAL: Final = Family(
    name="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    modules=llama_modules(),
    sizes=sizes_of(32000, 4096, 14336, 32, 32, 131072),
    keys=llama_keys(kv_heads=8),
    free=frozenset({"layer_pattern"}),
    layers=LayerKeys(window=4096),
    inert={"hidden_dropout": (0.0,)},
    # HF configs of mistralai/Mistral-7B-v0.1, -v0.3 and Mistral-Nemo-Base-2407.
    presets={
        "mistral-7b-v0.1": preset(
            "mistral",
            *(32000, 4096, 32, 32),
            n_kv_heads=8,
            ffn_dim=14336,
            context=32768,
            layer_pattern=({"window": 4096},),
        ),
        "mistral-7b-v0.3": preset(
            "mistral",
            *(32768, 4096, 32, 32),
            n_kv_heads=8,
            ffn_dim=14336,
            context=32768,
            rope_theta=1e6,
        ),
        "mistral-nemo-12b": preset(
            "mistral",
            *(131072, 5120, 40, 32),
            n_kv_heads=8,
            head_dim=128,
            ffn_dim=14336,
            context=131072,
            rope_theta=1e6,
        ),
    },
)
