"""MiniMax-M2: full attention with norms over all heads, and a router of sigmoids in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.errors import ConfigError, refusal
from meshwright.spec.families.base import (
    Family,
    expert_keys,
    expert_modules,
    head_norms,
    llama_keys,
    llama_modules,
    preset,
    sizes_of,
)

# What the published files say for their own code, and the one value under which it is this model.
_FIXED: Final[Mapping[str, object]] = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}


def _check(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for variants that transformers' class does not have either."""
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            rule = f"{key} = {config[key]!r} is not supported"
            raise ConfigError(refusal(rule, legal=[value]))
    kinds = config.get("attn_type_list")
    if isinstance(kinds, list) and any(kind != 1 for kind in kinds):
        raise ConfigError("attn_type_list must be 1 for each layer: full attention")


MINIMAX_M2: Final = Family(
    name="minimax_m2",
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    modules=llama_modules(
        **head_norms(),
        **expert_modules("block_sparse_moe", "w1", "w3", "w2"),
        **{"mlp.router.correction": "model.layers.{}.block_sparse_moe.e_score_correction_bias"},
    ),
    sizes=sizes_of(200064, 3072, 1536, 62, 48, 196608),
    keys=(
        *llama_keys(kv_heads=8, head_dim=128),
        *expert_keys(256, 8, hf_key="num_local_experts"),
    ),
    free=frozenset({"rotary_pct", "experts", "top_k"}),
    fixed={"qk_norm": "all", "router_scores": "sigmoid"},
    defaults={"norm_eps": 1e-6, "rope_theta": 5e6, "experts": 256, "top_k": 8},
    renamed={"num_local_experts": "num_experts"},
    inert={"hidden_dropout": (0.0,), "router_jitter_noise": (0.0,)},
    rotary_keys=("partial_rotary_factor",),
    rotary_dims_key="rotary_dim",
    rope_theta=5e6,
    scalings=("linear", "llama3", "yarn"),
    check=_check,
    # HF config of MiniMaxAI/MiniMax-M2.
    presets={
        "minimax-m2": preset(
            "minimax_m2",
            *(200064, 3072, 62, 48),
            n_kv_heads=8,
            head_dim=128,
            ffn_dim=1536,
            context=196608,
            rotary_pct=0.5,
        ),
    },
)
