"""ERNIE 4.5, dense: Llama whose rotation pairs adjacent dims, with biases everywhere or nowhere."""

from __future__ import annotations

from typing import Final

from meshwright.spec.families.base import (
    Family,
    Key,
    llama_keys,
    llama_modules,
    one_bias,
    preset,
    sizes_of,
)

_THETA: Final = 500000.0

ERNIE4_5: Final = Family(
    name="ernie4_5",
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    modules=llama_modules(),
    sizes=sizes_of(103424, 1024, 3072, 18, 16, 131072),
    keys=(
        *llama_keys(kv_heads=2, head_dim=128, eps=1e-5),
        Key("attention_bias", "use_bias", "flag", False),
        Key("mlp_bias", "use_bias", "flag", False),
    ),
    free=frozenset({"attention_bias", "mlp_bias"}),
    fixed={"rope_interleave": True},
    defaults={"rope_theta": _THETA, "tie_embeddings": True},
    ties=True,
    rope_theta=_THETA,
    inert={"hidden_dropout": (0.0,)},
    check_written=one_bias("ernie4_5"),
    # HF config of baidu/ERNIE-4.5-0.3B-PT: the defaults of transformers 5.23.
    presets={
        "ernie-4.5-0.3b": preset(
            "ernie4_5",
            *(103424, 1024, 18, 16),
            n_kv_heads=2,
            head_dim=128,
            ffn_dim=3072,
            context=131072,
            rope_theta=_THETA,
            tie_embeddings=True,
        ),
    },
)
