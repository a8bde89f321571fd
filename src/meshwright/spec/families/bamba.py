"""Bamba: Mamba-2 in most layers, attention that rotates half of each head in the others."""

from __future__ import annotations

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
from meshwright.spec.families.mamba import FREE, INERT, WRITTEN, mamba_keys, mamba_modules

_LAYER: Final = "model.layers.{}"
_SIZES: Final = {
    "mamba_heads": 128,
    "mamba_head_dim": 64,
    "mamba_groups": 1,
    "mamba_state": 256,
    "mamba_kernel": 4,
}
_MAMBA: Final[dict[str, Any]] = {"mamba": True}
_ATTENDING: Final = (9, 18, 27)

BAMBA: Final = Family(
    name="bamba",
    model_type="bamba",
    architecture="BambaForCausalLM",
    modules=llama_modules(
        **mamba_modules(f"{_LAYER}.mamba"),
        **{f"mlp.{proj}": f"{_LAYER}.feed_forward.{proj}_proj" for proj in ("gate", "up", "down")},
        mlp_norm=f"{_LAYER}.pre_ff_layernorm",
        norm="model.final_layernorm",
    ),
    sizes=sizes_of(128000, 4096, 14336, 32, 32, 262144),
    keys=(*llama_keys(kv_heads=8, eps=1e-5), *BIASES, *mamba_keys()),
    free=FREE | {"attention_bias", "mlp_bias", "rotary_pct"},
    defaults={"rotary_pct": 0.5, "layer_pattern": (_MAMBA,), **_SIZES},
    layers=LayerKeys(recurrence="mamba", attending="attn_layer_indices"),
    rotary_pct=0.5,
    inert=INERT,
    written=WRITTEN,
    # HF config of ibm-ai-platform/Bamba-9B-v1.
    presets={
        "bamba-9b": preset(
            "bamba",
            *(128256, 4096, 32, 32),
            n_kv_heads=8,
            ffn_dim=14336,
            context=262144,
            layer_pattern=[{} if layer in _ATTENDING else _MAMBA for layer in range(28)],
            **(_SIZES | {"mamba_state": 128}),
        ),
    },
)
