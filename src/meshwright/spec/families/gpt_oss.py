"""gpt-oss: experts with biases and a bounded activation, sinks, a window in every other layer.

arXiv:2508.10925.
"""

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
    sizes_of,
)
from meshwright.spec.families.layers import LayerKeys

# Of the published models: a window in every other layer, from the first on, and YaRN.
_PATTERN: Final[tuple[dict[str, int], ...]] = ({"window": 128}, {})
_YARN: Final = {
    "kind": "yarn",
    "factor": 32.0,
    "original_context": 4096,
    "truncate": False,
}
_MLP: Final = "model.layers.{}.mlp"
_EXPERTS: Final = f"{_MLP}.experts"


def _is_windowed(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has the window where a file has no `layer_types`."""
    return layer % 2 == 0


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return preset(
        "gpt_oss",
        *(201088, 2880, layers, 64),
        n_kv_heads=8,
        head_dim=64,
        ffn_dim=2880,
        context=131072,
        rope_theta=150000.0,
        rope_scaling=_YARN,
        layer_pattern=_PATTERN,
        experts=experts,
        top_k=4,
    )


GPT_OSS: Final = Family(
    name="gpt_oss",
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    modules={
        **llama_modules(),
        "attn.sinks": "model.layers.{}.self_attn.sinks",
        "mlp.router": f"{_MLP}.router",
        **{f"mlp.experts.{proj}.weight": f"{_EXPERTS}.gate_up_proj" for proj in ("gate", "up")},
        **{f"mlp.experts.{proj}.bias": f"{_EXPERTS}.gate_up_proj_bias" for proj in ("gate", "up")},
        "mlp.experts.down.weight": f"{_EXPERTS}.down_proj",
        "mlp.experts.down.bias": f"{_EXPERTS}.down_proj_bias",
    },
    fused_experts="in turn",
    sizes=sizes_of(201088, 2880, 2880, 36, 64, 131072),
    keys=(
        *llama_keys(kv_heads=8, head_dim=64, eps=1e-5),
        *expert_keys(128, 4, hf_key="num_local_experts"),
        Key("attention_bias", "attention_bias", "flag", True),
        Key("swiglu_limit", "swiglu_limit", "number", 7.0),
        Key("swiglu_alpha", "swiglu_alpha", "number", 1.702),
    ),
    free=frozenset(
        {
            *("attention_bias", "layer_pattern", "experts", "top_k"),
            *("swiglu_limit", "swiglu_alpha"),
        }
    ),
    fixed={"attention_sinks": True, "expert_bias": True},
    defaults={
        "attention_bias": True,
        "experts": 128,
        "top_k": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "rope_theta": 150000.0,
        "layer_pattern": _PATTERN,
    },
    layers=LayerKeys(window=128, is_windowed=_is_windowed),
    rope_theta=150000.0,
    rope_absent={
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    renamed={"num_local_experts": "num_experts"},
    written={"pad_token_id": None},
    quantised=("mxfp4",),
    inert={"hidden_dropout": (0.0,)},
    # HF configs of openai/gpt-oss-20b and gpt-oss-120b.
    presets={"gpt-oss-20b": _gpt_oss(24, 32), "gpt-oss-120b": _gpt_oss(36, 128)},
)
