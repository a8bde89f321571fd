"""Seed-OSS: Llama with biases of queries, keys and values, and heads of a size of their own."""

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

SEED_OSS: Final = Family(
    name="seed_oss",
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    modules=llama_modules(),
    sizes=sizes_of(155136, 4096, 27648, 64, 80, 524288),
    keys=(
        *llama_keys(kv_heads=8, head_dim=128),
        Key("attention_bias", "attention_bias", "flag", True),
        Key("output_bias", "attention_out_bias", "flag", False),
        Key("mlp_bias", "mlp_bias", "flag", False),
    ),
    free=frozenset({"attention_bias", "output_bias", "mlp_bias"}),
    defaults={"norm_eps": 1e-6, "attention_bias": True, "output_bias": False},
    written={"residual_dropout": 0.0, "pad_token_id": None},
    # Dropout of its pretraining, which published files have: `model.dropout` sets it here.
    inert={
        "attention_dropout": (0.0, 0.1),
        "residual_dropout": (0.0, 0.1),
        "hidden_dropout": (0.0,),
        "pretraining_tp": (1,),
    },
    # HF config of ByteDance-Seed/Seed-OSS-36B-Base.
    presets={
        "seed-oss-36b": preset(
            "seed_oss",
            *(155136, 5120, 64, 80),
            n_kv_heads=8,
            head_dim=128,
            ffn_dim=27648,
            context=524288,
            rope_theta=1e7,
        ),
    },
)
