"""OLMoE: Llama with norms over all heads of queries and keys, and experts. arXiv:2409.02060."""

from __future__ import annotations

from typing import Final

from meshwright.spec.families.base import (
    Family,
    Key,
    expert_keys,
    head_norms,
    llama_keys,
    llama_modules,
    preset,
    qwen_experts,
    sizes_of,
)

OLMOE: Final = Family(
    name="olmoe",
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    modules=llama_modules(**head_norms(), **qwen_experts()),
    sizes=sizes_of(50304, 2048, 2048, 16, 16, 4096),
    keys=(
        *llama_keys(eps=1e-5),
        *expert_keys(64, 8),
        Key("attention_bias", "attention_bias", "flag", False),
        Key("norm_top_k", "norm_topk_prob", "flag", False),
    ),
    free=frozenset({"attention_bias", "experts", "top_k", "norm_top_k"}),
    fixed={"qk_norm": "all"},
    defaults={"experts": 64, "top_k": 8, "norm_top_k": False},
    renamed={"num_experts": "num_local_experts"},
    inert={"hidden_dropout": (0.0,), "clip_qkv": ()},
    # arXiv:2409.02060, table 10, and the HF config of allenai/OLMoE-1B-7B-0924.
    presets={
        "olmoe-1b-7b": preset(
            "olmoe", *(50304, 2048, 16, 16), n_kv_heads=16, ffn_dim=1024, context=4096
        ),
    },
)
