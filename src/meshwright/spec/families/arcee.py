"""Arcee: Llama with a plain MLP, whose activation is the square of ReLU (arXiv:2109.08668)."""

from __future__ import annotations

from typing import Final

from meshwright.spec.families.base import (
    BIASES,
    Family,
    llama_keys,
    llama_modules,
    preset,
    sizes_of,
)

ARCEE: Final = Family(
    name="arcee",
    model_type="arcee",
    architecture="ArceeForCausalLM",
    modules=llama_modules(),
    sizes=sizes_of(32000, 2560, 18432, 32, 32, 4096),
    keys=(*llama_keys(eps=1e-5), *BIASES),
    free=frozenset({"attention_bias", "mlp_bias"}),
    fixed={"gated_mlp": False},
    defaults={"activation": "relu2"},
    default_activation="relu2",
    inert={"hidden_dropout": (0.0,)},
    # HF config of arcee-ai/AFM-4.5B-Base, before its context was extended.
    presets={
        "afm-4.5b": preset(
            "arcee",
            *(128004, 2560, 36, 20),
            n_kv_heads=4,
            head_dim=128,
            ffn_dim=18432,
            context=4096,
        ),
    },
)
