"""SmolLM3: Llama without rotation in every fourth layer, as in arXiv:2501.18795."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.spec.families.base import (
    BIASES,
    Family,
    llama_keys,
    llama_modules,
    preset,
    sizes_of,
)
from meshwright.spec.families.layers import LayerKeys

_PATTERN: Final[tuple[dict[str, Any], ...]] = ({}, {}, {}, {"rotary": False})


def _is_windowed(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a window where a file has no `layer_types`: those that do not rotate."""
    no_rope_layers = config.get("no_rope_layers")
    if isinstance(no_rope_layers, list) and layer < len(no_rope_layers):
        return not no_rope_layers[layer]
    return (layer + 1) % (config.get("no_rope_layer_interval") or 4) == 0


SMOLLM3: Final = Family(
    name="smollm3",
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    modules=llama_modules(),
    sizes=sizes_of(128256, 2048, 11008, 36, 16, 32768),
    keys=(*llama_keys(kv_heads=4), *BIASES),
    free=frozenset({"attention_bias", "mlp_bias", "layer_pattern"}),
    defaults={
        "norm_eps": 1e-6,
        "rope_theta": 2e6,
        "tie_embeddings": True,
        "layer_pattern": _PATTERN,
    },
    ties=True,
    rope_theta=2e6,
    layers=LayerKeys(is_windowed=_is_windowed, switch="use_sliding_window", rotates=True),
    written={"pad_token_id": None},  # else transformers pads with id 128004
    inert={"pretraining_tp": (1, 2), "hidden_dropout": (0.0,)},
    # HF config of HuggingFaceTB/SmolLM3-3B-Base.
    presets={
        "smollm3-3b": preset(
            *("smollm3", 128256, 2048, 36, 16),
            n_kv_heads=4,
            ffn_dim=11008,
            context=65536,
            rope_theta=5e6,
            norm_eps=1e-6,
            tie_embeddings=True,
            layer_pattern=_PATTERN,
        ),
    },
)
