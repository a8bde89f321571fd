"""DeepSeek-V3: latent attention, many small experts behind a router of sigmoids. arXiv:2412.19437.

Moonlight (arXiv:2502.16982) and Kimi K2 (arXiv:2507.20534) are of the same architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.spec.families.base import (
    CORRECTION,
    Family,
    Key,
    llama_modules,
    preset,
    qwen_experts,
    shared_experts,
    sizes_of,
)

_INSIDE: Final = "model.layers.{}"
_LATENT: Final = {
    "attn.q_a": "q_a_proj",
    "attn.q_a_norm": "q_a_layernorm",
    "attn.q_b": "q_b_proj",
    "attn.kv_a": "kv_a_proj_with_mqa",
    "attn.kv_a_norm": "kv_a_layernorm",
    "attn.kv_b": "kv_b_proj",
}
# Whether a null is another value than the absence of the key: false to transformers.
_NOT_NULL: Final = ("norm_topk_prob", "rope_interleave")
# Of the largest model, as transformers.
_DEFAULTS: Final = {
    "experts": 256,
    "top_k": 8,
    "expert_ffn_dim": 2048,
    "shared_ffn_dim": 2048,
    "dense_layers": 3,
    "expert_groups": 8,
    "top_groups": 4,
    "routed_scale": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}


def _check(config: Mapping[str, Any]) -> None:
    for key in _NOT_NULL:
        if key in config and config[key] is None:
            raise ConfigError(f"{key} = null must be true or false")


def _yarn(factor: float, beta_fast: float) -> dict[str, Any]:
    extra = {"original_context": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    return {"kind": "yarn", "factor": factor, "beta_fast": beta_fast, **extra}


DEEPSEEK_V3: Final = Family(
    name="deepseek_v3",
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    modules=llama_modules(
        **{ours: f"{_INSIDE}.self_attn.{hf_name}" for ours, hf_name in _LATENT.items()},
        **qwen_experts(),
        **shared_experts(),
        **CORRECTION,
    ),
    sizes=sizes_of(129280, 7168, 18432, 61, 128, 4096),
    keys=(
        Key("n_kv_heads", "num_key_value_heads", "size", 128),
        Key("norm_eps", "rms_norm_eps", "number", 1e-6),
        Key("attention_bias", "attention_bias", "flag", False),
        Key("experts", "n_routed_experts", "size", 256),
        Key("top_k", "num_experts_per_tok", "size", 8),
        Key("expert_ffn_dim", "moe_intermediate_size", "size", 2048),
        Key("shared_ffn_dim", "n_shared_experts", "experts", 1),
        Key("dense_layers", "first_k_dense_replace", "count", 3),
        Key("norm_top_k", "norm_topk_prob", "flag", True),
        Key("expert_groups", "n_group", "size", 8),
        Key("top_groups", "topk_group", "size", 4),
        Key("routed_scale", "routed_scaling_factor", "number", 2.5),
        Key("q_lora_rank", "q_lora_rank", "optional size", 1536),
        Key("kv_lora_rank", "kv_lora_rank", "size", 512),
        Key("qk_nope_head_dim", "qk_nope_head_dim", "size", 128),
        Key("qk_rope_head_dim", "qk_rope_head_dim", "size", 64),
        Key("v_head_dim", "v_head_dim", "size", 128),
        Key("rope_interleave", "rope_interleave", "flag", True),
    ),
    free=frozenset({*_DEFAULTS, "attention_bias", "norm_top_k"}),
    fixed={"router_scores": "sigmoid"},
    defaults={"norm_eps": 1e-6, **_DEFAULTS},
    # What DeepSeek's own files say of the router, for their own code.
    written={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    inert={
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "hidden_dropout": (0.0,),
    },
    renamed={"n_routed_experts": "num_local_experts"},
    grouped=False,
    head_dim_parts=("qk_nope_head_dim", "qk_rope_head_dim"),
    scalings=("linear", "yarn"),
    kept_in_fp32=("mlp.router.correction",),
    predicts_ahead=True,
    check=_check,
    # HF configs of deepseek-ai/DeepSeek-V3, moonshotai/Moonlight-16B-A3B and Kimi-K2-Base.
    presets={
        "deepseek-v3": preset(
            "deepseek_v3",
            *(129280, 7168, 61, 128),
            ffn_dim=18432,
            context=163840,
            rope_scaling=_yarn(40.0, 32.0),
        ),
        "moonlight-16b-a3b": preset(
            "deepseek_v3",
            *(163840, 2048, 27, 16),
            ffn_dim=11264,
            context=8192,
            rope_theta=50000.0,
            norm_eps=1e-5,
            experts=64,
            top_k=6,
            expert_ffn_dim=1408,
            shared_ffn_dim=2816,
            dense_layers=1,
            expert_groups=1,
            top_groups=1,
            routed_scale=2.446,
            q_lora_rank=0,
        ),
        "kimi-k2": preset(
            "deepseek_v3",
            *(163840, 7168, 61, 64),
            ffn_dim=18432,
            context=131072,
            rope_theta=50000.0,
            rope_scaling=_yarn(32.0, 1.0),
            experts=384,
            dense_layers=1,
            expert_groups=1,
            top_groups=1,
            routed_scale=2.827,
        ),
    },
)
