"""GLM-4.5 and 4.6: many small experts behind a router of sigmoids, heads that rotate in part.

arXiv:2508.06471.
"""

from __future__ import annotations

from typing import Any, Final

from meshwright.spec.families.base import (
    CORRECTION,
    Family,
    Key,
    head_norms,
    llama_keys,
    llama_modules,
    preset,
    qwen_experts,
    routed_keys,
    shared_experts,
    sizes_of,
)


def _glm(dim: int, layers: int, ffn: int, width: int, **fields: Any) -> dict[str, Any]:
    return preset(
        "glm4_moe",
        *(151552, dim, layers, 96),
        n_kv_heads=8,
        head_dim=128,
        ffn_dim=ffn,
        expert_ffn_dim=width,
        shared_ffn_dim=width,
        rope_theta=1e6,
        attention_bias=True,
        **fields,
    )


GLM4_MOE: Final = Family(
    name="glm4_moe",
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    modules=llama_modules(**head_norms(), **qwen_experts(), **shared_experts(), **CORRECTION),
    sizes=sizes_of(151552, 4096, 10944, 46, 96, 131072),
    keys=(
        *llama_keys(kv_heads=8, eps=1e-5),
        Key("attention_bias", "attention_bias", "flag", False),
        Key("qk_norm", "use_qk_norm", "norm of heads", False),
        *routed_keys(experts=128, top_k=8, width=1408, dense=1),
    ),
    free=frozenset(
        {
            *("attention_bias", "qk_norm", "rotary_pct", "experts", "top_k", "expert_ffn_dim"),
            *("shared_ffn_dim", "dense_layers", "norm_top_k", "expert_groups", "top_groups"),
            "routed_scale",
        }
    ),
    fixed={"output_bias": False, "router_scores": "sigmoid"},
    defaults={
        "rotary_pct": 0.5,
        "experts": 128,
        "top_k": 8,
        "expert_ffn_dim": 1408,
        "shared_ffn_dim": 1408,
        "dense_layers": 1,
    },
    inert={"hidden_dropout": (0.0,)},
    renamed={"n_routed_experts": "num_local_experts"},
    rotary_pct=0.5,
    rotary_keys=("partial_rotary_factor",),
    scalings=("linear", "llama3", "yarn"),
    kept_in_fp32=("mlp.router.correction",),
    predicts_ahead=True,
    # HF configs of zai-org/GLM-4.5-Air, GLM-4.5 and GLM-4.6.
    presets={
        "glm-4.5-air": _glm(4096, 46, 10944, 1408, context=131072),
        "glm-4.5": _glm(
            *(5120, 92, 12288, 1536),
            context=131072,
            qk_norm="head",
            experts=160,
            dense_layers=3,
            routed_scale=2.5,
        ),
        "glm-4.6": _glm(
            *(5120, 92, 12288, 1536),
            context=202752,
            qk_norm="head",
            experts=160,
            dense_layers=3,
            routed_scale=2.5,
        ),
    },
)
