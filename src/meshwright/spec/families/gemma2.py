"""Gemma 2: norms on both sides of a sublayer, soft caps, a window in every other layer.

arXiv:2408.00118.
"""

from __future__ import annotations

from typing import Any, Final

from meshwright.spec.families.base import (
    Family,
    Key,
    gemma_modules,
    llama_keys,
    preset,
    sizes_of,
)
from meshwright.spec.families.layers import LayerKeys

_PATTERN: Final[tuple[dict[str, Any], ...]] = ({"window": 4096}, {})


def _gemma2(dim: int, layers: int, heads: int, ffn: int, **overrides: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "head_dim": 256,
        "n_kv_heads": heads // 2,
        "layer_pattern": _PATTERN,
    }
    return preset(
        "gemma2",
        *(256000, dim, layers, heads),
        ffn_dim=ffn,
        context=8192,
        activation="gelu_tanh",
        tie_embeddings=True,
        norm_eps=1e-6,
        **(defaults | overrides),
    )


GEMMA2: Final = Family(
    name="gemma2",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    modules=gemma_modules(),
    sizes=sizes_of(256000, 2304, 9216, 26, 8, 8192),
    keys=(
        *llama_keys(kv_heads=4, head_dim=256),
        Key("attention_bias", "attention_bias", "flag", False),
        Key("attention_scale", "query_pre_attn_scalar", "inverse root", 256),
        Key("attention_softcap", "attn_logit_softcapping", "optional", 50.0),
        Key("logits_softcap", "final_logit_softcapping", "optional", 30.0),
    ),
    free=frozenset(
        {
            "attention_bias",
            "attention_scale",
            "attention_softcap",
            "logits_softcap",
            "layer_pattern",
        }
    ),
    fixed={"norm_placement": "both", "norm_plus_one": True},
    derived={"embedding_scale": lambda dim: float(dim**0.5)},
    defaults={
        "activation": "gelu_tanh",
        "tie_embeddings": True,
        "norm_eps": 1e-6,
        "attention_scale": 256**-0.5,
        "attention_softcap": 50.0,
        "logits_softcap": 30.0,
        "layer_pattern": _PATTERN,
    },
    activation_key="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    ties=True,
    layers=LayerKeys(window=4096, is_windowed=lambda config, layer: layer % 2 == 0),
    written={"pad_token_id": 0},
    inert={"use_bidirectional_attention": (False,), "hidden_dropout": (0.0,)},
    # arXiv:2408.00118, table 1, and the HF configs of google/gemma-2-*.
    presets={
        "gemma-2-2b": _gemma2(2304, 26, 8, 9216),
        "gemma-2-9b": _gemma2(3584, 42, 16, 14336),
        "gemma-2-27b": _gemma2(4608, 46, 32, 36864, head_dim=128, attention_scale=144**-0.5),
    },
)
