"""Qwen3-Next: Gated DeltaNet in most layers, gated attention in the others, many small experts.

HF config of Qwen/Qwen3-Next-80B-A3B-Instruct; arXiv:2412.06464 for Gated DeltaNet.
"""

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

_LAYER: Final = "model.layers.{}"
_DELTA: Final = f"{_LAYER}.linear_attn"
_CONV: Final = f"{_DELTA}.conv1d.weight"
_INTERVAL: Final = 4
_SIZES: Final = {
    "delta_heads": 32,
    "delta_key_heads": 16,
    "delta_key_dim": 128,
    "delta_value_dim": 128,
    "delta_kernel": 4,
}
_EXPERTS: Final = {
    "experts": 512,
    "top_k": 10,
    "expert_ffn_dim": 512,
    "shared_ffn_dim": 512,
}
_PATTERN: Final[tuple[dict[str, Any], ...]] = (*({"delta": True},) * (_INTERVAL - 1), {})

QWEN3_NEXT: Final = Family(
    name="qwen3_next",
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    modules=llama_modules(
        **head_norms(),
        **qwen_experts(),
        **{
            f"mlp.shared.{proj}": f"{_LAYER}.mlp.shared_expert.{proj}_proj"
            for proj in ("gate", "up", "down")
        },
        **{
            "mlp.shared_gate": f"{_LAYER}.mlp.shared_expert_gate",
            # Of each head its query, then its gate.
            "attn.gate": f"{_LAYER}.self_attn.q_proj",
            "attn.qkvz": f"{_DELTA}.in_proj_qkvz",
            "attn.ba": f"{_DELTA}.in_proj_ba",
            "attn.out": f"{_DELTA}.out_proj",
            "attn.gated_norm": f"{_DELTA}.norm",
            "attn.q_conv": _CONV,
            "attn.k_conv": _CONV,
            "attn.v_conv": _CONV,
            "attn.a_log": f"{_DELTA}.A_log",
            "attn.dt_bias": f"{_DELTA}.dt_bias",
        },
    ),
    sizes=sizes_of(151936, 2048, 5632, 48, 16, 32768),
    keys=(
        *llama_keys(kv_heads=2, head_dim=256),
        *expert_keys(512, 10, kind="count"),
        Key("attention_bias", "attention_bias", "flag", False),
        Key("expert_ffn_dim", "moe_intermediate_size", "size", 512),
        Key("shared_ffn_dim", "shared_expert_intermediate_size", "size", 512),
        Key("norm_top_k", "norm_topk_prob", "flag", True),
        Key("delta_heads", "linear_num_value_heads", "size", 32),
        Key("delta_key_heads", "linear_num_key_heads", "size", 16),
        Key("delta_key_dim", "linear_key_head_dim", "size", 128),
        Key("delta_value_dim", "linear_value_head_dim", "size", 128),
        Key("delta_kernel", "linear_conv_kernel_dim", "size", 4),
    ),
    free=frozenset(
        {*_SIZES, *_EXPERTS, "norm_top_k", "attention_bias", "rotary_pct", "layer_pattern"}
    ),
    fixed={
        "qk_norm": "head",
        "norm_plus_one": True,
        "attention_gate": True,
        "shared_gate": True,
    },
    defaults={
        "norm_eps": 1e-6,
        "rotary_pct": 0.25,
        "layer_pattern": _PATTERN,
        **_SIZES,
        **_EXPERTS,
    },
    layers=LayerKeys(sparse=True, recurrence="delta", interval=_INTERVAL),
    by_head=frozenset({"attn.q", "attn.gate"}),
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
