"""OLMo 3: OLMo 2 with a window in three of four layers, and YaRN in the fourth."""

from __future__ import annotations

from typing import Any, Final

from meshwright.spec.families.base import Family, Key, llama_keys, preset, sizes_of
from meshwright.spec.families.layers import LayerKeys
from meshwright.spec.families.olmo2 import olmo_modules

_THETA: Final = 500000.0
_WINDOW: Final = 4096
# Layers with a window rotate by the same base, unscaled.
_LOCAL: Final = {"window": _WINDOW, "rope_theta": _THETA}


def _olmo3(dim: int, layers: int, heads: int, ffn: int, **fields: Any) -> dict[str, Any]:
    fields = {"n_kv_heads": heads} | fields
    return preset(
        "olmo3",
        *(100278, dim, layers, heads),
        ffn_dim=ffn,
        context=65536,
        rope_theta=_THETA,
        rope_scaling={"kind": "yarn", "factor": 8.0, "original_context": 8192},
        norm_eps=1e-6,
        layer_pattern=(_LOCAL, _LOCAL, _LOCAL, {}),
        **fields,
    )


OLMO3: Final = Family(
    name="olmo3",
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    modules=olmo_modules(),
    sizes=sizes_of(50304, 4096, 11008, 32, 32, 2048),
    keys=(*llama_keys(eps=1e-5), Key("attention_bias", "attention_bias", "flag", False)),
    free=frozenset({"attention_bias", "layer_pattern"}),
    fixed={"norm_placement": "after", "qk_norm": "all"},
    defaults={
        "rope_theta": _THETA,
        "layer_pattern": ({"window": _WINDOW}, {"window": _WINDOW}, {"window": _WINDOW}, {}),
    },
    rope_theta=_THETA,
    kinds_of_layers=True,
    layers=LayerKeys(window=_WINDOW, is_windowed=lambda config, layer: (layer + 1) % 4 != 0),
    inert={"hidden_dropout": (0.0,)},
    # HF configs of allenai/Olmo-3-1025-7B and Olmo-3-1125-32B.
    presets={
        "olmo-3-7b": _olmo3(4096, 32, 32, 11008),
        "olmo-3-32b": _olmo3(5120, 64, 40, 27648, n_kv_heads=8),
    },
)
