"""Gemma 3, its text model: norms of heads, five layers with a window to one without, two bases.

arXiv:2503.19786.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.spec.families.base import (
    Family,
    Key,
    gemma_modules,
    head_norms,
    llama_keys,
    preset,
    sizes_of,
)
from meshwright.spec.families.layers import LayerKeys

_LOCAL: Final = 10000.0
_EVERY: Final = 6


def _pattern(window: int) -> tuple[dict[str, Any], ...]:
    """Return five layers with a window and a base of their own, and one that sees all."""
    return (*({"window": window, "rope_theta": _LOCAL} for _ in range(_EVERY - 1)), {})


def _is_windowed(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a window where a file has no `layer_types`."""
    period = config.get("sliding_window_pattern", _EVERY)
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise ConfigError(f"sliding_window_pattern = {period!r} must be at least 1")
    return (layer + 1) % period != 0


def _gemma3(dim: int, layers: int, heads: int, ffn: int, **overrides: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "vocab_size": 262208,
        "head_dim": 256,
        "n_kv_heads": heads // 2,
        "context": 131072,
        "rope_scaling": {"kind": "linear", "factor": 8.0},
        "layer_pattern": _pattern(1024),
    }
    fields |= overrides
    return preset(
        "gemma3",
        *(fields.pop("vocab_size"), dim, layers, heads),
        ffn_dim=ffn,
        rope_theta=1e6,
        activation="gelu_tanh",
        tie_embeddings=True,
        norm_eps=1e-6,
        **fields,
    )


GEMMA3: Final = Family(
    name="gemma3",
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    modules=gemma_modules(**head_norms()),
    sizes=sizes_of(262208, 2304, 9216, 26, 8, 131072),
    keys=(
        *llama_keys(kv_heads=4, head_dim=256),
        Key("attention_bias", "attention_bias", "flag", False),
        Key("attention_scale", "query_pre_attn_scalar", "inverse root", 256),
        Key("logits_softcap", "final_logit_softcapping", "optional", None),
    ),
    free=frozenset(
        {
            "attention_bias",
            "attention_scale",
            "logits_softcap",
            "layer_pattern",
        }
    ),
    fixed={"norm_placement": "both", "norm_plus_one": True, "qk_norm": "head"},
    derived={"embedding_scale": lambda dim: float(dim**0.5)},
    defaults={
        "activation": "gelu_tanh",
        "tie_embeddings": True,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_scale": 256**-0.5,
        "layer_pattern": _pattern(4096),
    },
    activation_key="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    ties=True,
    rope_theta=1e6,
    kinds_of_layers=True,
    sliding_theta=_LOCAL,
    sliding_theta_key="rope_local_base_freq",
    layers=LayerKeys(window=4096, is_windowed=_is_windowed),
    written={"pad_token_id": 0},
    # transformers reads the cap of scores and applies none.
    inert={
        "attn_logit_softcapping": (),
        "use_bidirectional_attention": (False,),
        "hidden_dropout": (0.0,),
    },
    # arXiv:2503.19786, tables 1 and 2, and the HF configs of google/gemma-3-*: of the larger ones
    # the text model alone.
    presets={
        "gemma-3-1b": _gemma3(
            *(1152, 26, 4, 6912),
            vocab_size=262144,
            n_kv_heads=1,
            context=32768,
            rope_scaling=None,
            layer_pattern=_pattern(512),
        ),
        "gemma-3-4b": _gemma3(2560, 34, 8, 10240),
        "gemma-3-12b": _gemma3(3840, 48, 16, 15360),
        "gemma-3-27b": _gemma3(5376, 62, 32, 21504, head_dim=128, attention_scale=168**-0.5),
    },
)
