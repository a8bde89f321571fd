"""Mixtral: Mistral with experts in every layer. arXiv:2401.04088."""

from __future__ import annotations

from typing import Final

from meshwright.spec.families.base import (
    Family,
    expert_keys,
    expert_modules,
    llama_keys,
    llama_modules,
    preset,
    sizes_of,
)
from meshwright.spec.families.layers import LayerKeys

MIXTRAL: Final = Family(
    name="mixtral",
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    modules=llama_modules(**expert_modules("block_sparse_moe", "w1", "w3", "w2")),
    sizes=sizes_of(32000, 4096, 14336, 32, 32, 131072),
    keys=(
        *llama_keys(kv_heads=8, eps=1e-5),
        *expert_keys(8, 2, hf_key="num_local_experts"),
    ),
    free=frozenset({"layer_pattern", "experts", "top_k"}),
    defaults={"experts": 8, "top_k": 2},
    layers=LayerKeys(),
    rope_theta=1e6,
    renamed={"num_local_experts": "num_experts"},
    inert={"hidden_dropout": (0.0,), "router_jitter_noise": (0.0,)},
    # HF configs of mistralai/Mixtral-8x7B-v0.1 and Mixtral-8x22B-v0.1.
    presets={
        "mixtral-8x7b": preset(
            "mixtral",
            *(32000, 4096, 32, 32),
            n_kv_heads=8,
            ffn_dim=14336,
            context=32768,
            rope_theta=1e6,
        ),
        "mixtral-8x22b": preset(
            "mixtral",
            *(32000, 6144, 56, 48),
            n_kv_heads=8,
            ffn_dim=16384,
            context=65536,
            rope_theta=1e6,
        ),
    },
)
