"""Qwen3.5, the text models: Gated DeltaNet in most layers, gated attention in the others, dense or
with many small experts.

Classes `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig` of transformers 5.23, whose defaults are
those of Qwen/Qwen3.5-9B and Qwen/Qwen3.5-35B-A3B; arXiv:2412.06464 for Gated DeltaNet.
"""

from __future__ import annotations

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
from meshwright.spec.families.delta import (
    FIXED,
    GATED_HEADS,
    KEYS,
    LAYERS,
    PATTERN,
    SIZES,
    delta_modules,
    gated_shared_expert,
)

_QKV: Final = dict.fromkeys(("queries", "keys", "values"), "in_proj_qkv")
_DELTA: Final = delta_modules({**_QKV, "z": "in_proj_z", "b": "in_proj_b", "a": "in_proj_a"})
_EXPERTS: Final = {
    "experts": 256,
    "top_k": 8,
    "expert_ffn_dim": 512,
    "shared_ffn_dim": 512,
}
_FREE: Final = frozenset({*SIZES, "attention_bias", "rotary_pct", "layer_pattern"})
_DEFAULTS: Final = {
    "norm_eps": 1e-6,
    "rotary_pct": 0.25,
    "layer_pattern": PATTERN,
    **SIZES,
}
_KEYS: Final = (Key("attention_bias", "attention_bias", "flag", False), *KEYS)
# What published files say besides: transformers reads none of it.
_INERT: Final[dict[str, tuple[object, ...]]] = {
    "hidden_dropout": (0.0,),
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "mtp_use_dedicated_embeddings": (False,),
}


def _qwen3_5(family: str, dim: int, layers: int, kv_heads: int, **fields: Any) -> dict[str, Any]:
    rotary = {"context": 262144, "rope_theta": 1e7}
    sizes = {"n_kv_heads": kv_heads, "head_dim": 256}
    return preset(family, 248320, dim, layers, 16, **sizes, **rotary, **fields)


QWEN3_5: Final = Family(
    name="qwen3_5",
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    modules=llama_modules(**_DELTA),
    sizes=sizes_of(248320, 4096, 12288, 32, 16, 32768),
    keys=(*llama_keys(kv_heads=4, head_dim=256), *_KEYS),
    free=_FREE,
    fixed=FIXED,
    defaults=_DEFAULTS,
    layers=LAYERS,
    by_head=GATED_HEADS,
    inert=_INERT,
    rotary_pct=0.25,
    rotary_keys=("partial_rotary_factor",),
    predicts_ahead=True,
    presets={"qwen3.5-9b": _qwen3_5("qwen3_5", 4096, 32, 4, ffn_dim=12288)},
)

QWEN3_5_MOE: Final = Family(
    name="qwen3_5_moe",
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    modules=llama_modules(**qwen_experts(), **gated_shared_expert(), **_DELTA),
    sizes=sizes_of(248320, 2048, 512, 40, 16, 32768),
    keys=(
        *llama_keys(kv_heads=2, head_dim=256),
        *expert_keys(256, 8),
        Key("expert_ffn_dim", "moe_intermediate_size", "size", 512),
        Key("shared_ffn_dim", "shared_expert_intermediate_size", "size", 512),
        *_KEYS,
    ),
    free=_FREE | set(_EXPERTS),
    fixed={**FIXED, "shared_gate": True},
    defaults={**_DEFAULTS, **_EXPERTS},
    layers=LAYERS,
    by_head=GATED_HEADS,
    inert=_INERT,
    renamed={"num_experts": "num_local_experts"},
    rotary_pct=0.25,
    rotary_keys=("partial_rotary_factor",),
    predicts_ahead=True,
    presets={"qwen3.5-35b-a3b": _qwen3_5("qwen3_5_moe", 2048, 40, 2, ffn_dim=512)},
)
