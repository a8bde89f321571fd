"""Qwen3-Next: Gated DeltaNet in most layers, gated attention in the others, many small experts.

HF config of Qwen/Qwen3-Next-80B-A3B-Instruct; arXiv:2412.06464 for Gated DeltaNet.
"""

from __future__ import annotations

from typing import Final

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
    PATTERN,
    SIZES,
    SPARSE_LAYERS,
    delta_modules,
    gated_shared_expert,
)

# Of each key head, its query, its key, and the values and gates of the heads that share it.
_QKVZ: Final = dict.fromkeys(("queries", "keys", "values", "z"), "in_proj_qkvz")
_BA: Final = dict.fromkeys(("b", "a"), "in_proj_ba")
_EXPERTS: Final = {
    "experts": 512,
    "top_k": 10,
    "expert_ffn_dim": 512,
    "shared_ffn_dim": 512,
}

QWEN3_NEXT: Final = Family(
    name="qwen3_next",
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    modules=llama_modules(
        **qwen_experts(),
        **gated_shared_expert(),
        **delta_modules({**_QKVZ, **_BA}),
    ),
    sizes=sizes_of(151936, 2048, 5632, 48, 16, 32768),
    keys=(
        *llama_keys(kv_heads=2, head_dim=256),
        *expert_keys(512, 10, kind="count"),
        Key("attention_bias", "attention_bias", "flag", False),
        Key("expert_ffn_dim", "moe_intermediate_size", "size", 512),
        Key("shared_ffn_dim", "shared_expert_intermediate_size", "size", 512),
        Key("norm_top_k", "norm_topk_prob", "flag", True),
        *KEYS,
    ),
    free=frozenset(
        {*SIZES, *_EXPERTS, "norm_top_k", "attention_bias", "rotary_pct", "layer_pattern"}
    ),
    fixed={**FIXED, "shared_gate": True},
    defaults={
        "norm_eps": 1e-6,
        "rotary_pct": 0.25,
        "layer_pattern": PATTERN,
        **SIZES,
        **_EXPERTS,
    },
    layers=SPARSE_LAYERS,
    by_head={
        **GATED_HEADS,
        **dict.fromkeys((f"attn.{name}" for name in (*_QKVZ, *_BA)), "delta_key_heads"),
    },
    inert={"hidden_dropout": (0.0,)},
    renamed={"num_experts": "num_local_experts"},
    rotary_pct=0.25,
    rotary_keys=("partial_rotary_factor",),
    predicts_ahead=True,
    presets={
        "qwen3-next-80b-a3b": preset(
            "qwen3_next",
            *(151936, 2048, 48, 16),
            n_kv_heads=2,
            head_dim=256,
            ffn_dim=5120,
            context=262144,
            rope_theta=1e7,
        ),
    },
)
