"""GLM-4, dense: norms on both sides of a sublayer, half of each head rotates by adjacent dims.

arXiv:2406.12793, and the class `Glm4Config` of transformers 5.23.
"""

from __future__ import annotations

from typing import Final

from meshwright.spec.families.base import (
    Family,
    Key,
    llama_keys,
    llama_modules,
    preset,
    sizes_of,
)

_LAYER: Final = "model.layers.{}"
_NORMS: Final = {
    "attn_post_norm": f"{_LAYER}.post_self_attn_layernorm",
    "mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "mlp_post_norm": f"{_LAYER}.post_mlp_layernorm",
}
_GATE_UP: Final = dict.fromkeys(("mlp.gate", "mlp.up"), f"{_LAYER}.mlp.gate_up_proj")

GLM4: Final = Family(
    name="glm4",
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    modules=llama_modules() | _NORMS | _GATE_UP,
    sizes=sizes_of(151552, 4096, 13696, 40, 32, 131072),
    keys=(
        *llama_keys(kv_heads=2, head_dim=128, eps=1.5625e-07),
        Key("attention_bias", "attention_bias", "flag", True),
    ),
    free=frozenset({"attention_bias", "rotary_pct"}),
    fixed={"norm_placement": "both", "output_bias": False, "rope_interleave": True},
    defaults={"rotary_pct": 0.5, "attention_bias": True},
    written={"pad_token_id": None},  # else transformers pads with id 151329
    inert={"hidden_dropout": (0.0,)},
    rotary_pct=0.5,
    rotary_keys=("partial_rotary_factor",),
    # HF config of THUDM/GLM-4-9B-0414.
    presets={
        "glm-4-9b": preset(
            "glm4",
            *(151552, 4096, 40, 32),
            n_kv_heads=2,
            head_dim=128,
            ffn_dim=13696,
            context=32768,
        ),
    },
)
