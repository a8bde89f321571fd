"""Qwen2-MoE, Qwen1.5-MoE: Qwen2 with experts, and a shared one behind a gate. arXiv:2407.10671."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.spec.families.base import (
    Family,
    Key,
    expert_keys,
    llama_keys,
    llama_modules,
    preset,
    qwen_experts,
    sizes_of,
)
from meshwright.spec.families.layers import LayerKeys


def _is_windowed(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has the window where a file has no `layer_types`: every other early one."""
    return layer % 2 == 0 and layer < config.get("max_window_layers", 28)


_SHARED: Final = {
    f"mlp.shared.{proj}": f"model.layers.{{}}.mlp.shared_expert.{proj}_proj"
    for proj in ("gate", "up", "down")
}

QWEN2_MOE: Final = Family(
    name="qwen2_moe",
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    modules=llama_modules(
        **qwen_experts(),
        **_SHARED,
        **{"mlp.shared_gate": "model.layers.{}.mlp.shared_expert_gate"},
    ),
    sizes=sizes_of(151936, 2048, 5632, 24, 16, 32768),
    keys=(
        *llama_keys(kv_heads=16),
        *expert_keys(60, 4),
        Key("attention_bias", "qkv_bias", "flag", True),
        Key("expert_ffn_dim", "moe_intermediate_size", "size", 1408),
        Key("shared_ffn_dim", "shared_expert_intermediate_size", "size", 5632),
        Key("norm_top_k", "norm_topk_prob", "flag", False),
    ),
    free=frozenset(
        {
            *("attention_bias", "layer_pattern", "experts", "top_k"),
            *("expert_ffn_dim", "shared_ffn_dim", "norm_top_k"),
        }
    ),
    fixed={"output_bias": False, "shared_gate": True},
    defaults={
        "norm_eps": 1e-6,
        "attention_bias": True,
        "experts": 60,
        "top_k": 4,
        "expert_ffn_dim": 1408,
        "shared_ffn_dim": 5632,
        "norm_top_k": False,
    },
    layers=LayerKeys(
        window=4096, is_windowed=_is_windowed, switch="use_sliding_window", sparse=True
    ),
    inert={"hidden_dropout": (0.0,)},
    # HF configs of Qwen/Qwen1.5-MoE-A2.7B and Qwen/Qwen2-57B-A14B.
    presets={
        "qwen1.5-moe-a2.7b": preset(
            "qwen2_moe",
            *(151936, 2048, 24, 16),
            n_kv_heads=16,
            ffn_dim=5632,
            context=8192,
            rope_theta=1e6,
            norm_eps=1e-6,
        ),
        "qwen2-57b-a14b": preset(
            "qwen2_moe",
            *(151936, 3584, 28, 28),
            n_kv_heads=4,
            ffn_dim=18944,
            context=131072,
            rope_theta=1e6,
            norm_eps=1e-6,
            experts=64,
            top_k=8,
            expert_ffn_dim=2560,
            shared_ffn_dim=20480,
        ),
    },
)
