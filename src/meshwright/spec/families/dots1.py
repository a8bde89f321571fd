"""dots.llm1: attention of Qwen3 before the experts of DeepSeek-V3. arXiv:2506.05767."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.errors import ConfigError
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
from meshwright.spec.families.layers import LayerKeys, starts_at

# transformers has no defaults for these.
_NEEDED: Final = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts")


def _check(config: Mapping[str, Any]) -> None:
    for key in _NEEDED:
        if config.get(key) is None:
            raise ConfigError(f"a dots1 config needs the key {key!r}")


DOTS1: Final = Family(
    name="dots1",
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    modules=llama_modules(**head_norms(), **qwen_experts(), **shared_experts(), **CORRECTION),
    sizes=sizes_of(152064, 4608, 10944, 62, 32, 2048),
    keys=(
        *llama_keys(kv_heads=32),
        Key("attention_bias", "attention_bias", "flag", False),
        *routed_keys(experts=128, top_k=6, width=1408, dense=0, normalises=False),
    ),
    free=frozenset(
        {
            *("attention_bias", "layer_pattern", "experts", "top_k", "expert_ffn_dim"),
            *("shared_ffn_dim", "dense_layers", "norm_top_k", "expert_groups", "top_groups"),
            "routed_scale",
        }
    ),
    fixed={"qk_norm": "head", "router_scores": "sigmoid"},
    defaults={
        "norm_eps": 1e-6,
        "experts": 128,
        "top_k": 6,
        "expert_ffn_dim": 1408,
        "shared_ffn_dim": 2816,
        "dense_layers": 1,
    },
    layers=LayerKeys(window=4096, is_windowed=starts_at(62)),
    # What the published files say of the router, for their own code.
    inert={
        "hidden_dropout": (0.0,),
        "scoring_func": ("noaux_tc", "sigmoid"),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    renamed={"n_routed_experts": "num_local_experts"},
    scalings=("linear", "llama3", "yarn"),
    kept_in_fp32=("mlp.router.correction",),
    check=_check,
    # HF config of rednote-hilab/dots.llm1.base.
    presets={
        "dots.llm1": preset(
            "dots1",
            *(152064, 4096, 62, 32),
            n_kv_heads=32,
            head_dim=128,
            ffn_dim=10944,
            context=32768,
            rope_theta=1e7,
            norm_eps=1e-5,
            routed_scale=2.5,
        ),
    },
)
