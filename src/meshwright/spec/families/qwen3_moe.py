"""Qwen3-MoE: Qwen3 with experts. arXiv:2505.09388."""

from __future__ import annotations

from typing import Any, Final

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
from meshwright.spec.families.layers import LayerKeys


def _qwen3(dim: int, layers: int, heads: int, ffn: int, expert: int) -> dict[str, Any]:
    fields = {"head_dim": 128, "rope_theta": 1e6, "norm_eps": 1e-6, "context": 40960}
    sizes = {"n_kv_heads": 4, "ffn_dim": ffn, "expert_ffn_dim": expert}
    return preset("qwen3_moe", 151936, dim, layers, heads, **sizes, **fields)


QWEN3_MOE: Final = Family(
    name="qwen3_moe",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    modules=llama_modules(**head_norms(), **qwen_experts()),
    sizes=sizes_of(151936, 2048, 6144, 24, 32, 32768),
    keys=(
        *llama_keys(kv_heads=4),
        *expert_keys(128, 8),
        Key("attention_bias", "attention_bias", "flag", False),
        Key("expert_ffn_dim", "moe_intermediate_size", "size", 768),
        Key("norm_top_k", "norm_topk_prob", "flag", False),
    ),
    free=frozenset(
        {
            *("attention_bias", "layer_pattern", "experts", "top_k"),
            *("expert_ffn_dim", "norm_top_k"),
        }
    ),
    fixed={"qk_norm": "head"},
    # The published models renormalise, though the absence of the key means that they don't.
    defaults={"norm_eps": 1e-6, "experts": 128, "top_k": 8, "expert_ffn_dim": 768},
    layers=LayerKeys(window=4096, switch="use_sliding_window", sparse=True),
    renamed={"num_experts": "num_local_experts"},
    inert={"hidden_dropout": (0.0,)},
    # arXiv:2505.09388, table 2, and the HF configs of Qwen/Qwen3-*-A*.
    presets={
        "qwen3-30b-a3b": _qwen3(2048, 48, 32, 6144, 768),
        "qwen3-235b-a22b": _qwen3(4096, 94, 64, 12288, 1536),
    },
)
