"""Gemma 1: Llama with norms of 1 + weight, an embedding times sqrt(dim), a gate of GELU.

arXiv:2403.08295.
"""

from __future__ import annotations

from typing import Any, Final

from meshwright.spec.families.base import (
    Family,
    Key,
    llama_keys,
    llama_modules,
    preset,
    sizes_of,
)


def _gemma(dim: int, layers: int, heads: int, kv: int, ffn: int) -> dict[str, Any]:
    return preset(
        "gemma",
        *(256000, dim, layers, heads),
        n_kv_heads=kv,
        head_dim=256,
        ffn_dim=ffn,
        context=8192,
        activation="gelu_tanh",
        tie_embeddings=True,
        norm_eps=1e-6,
    )


GEMMA: Final = Family(
    name="gemma",
    model_type="gemma",
    architecture="GemmaForCausalLM",
    modules=llama_modules(),
    sizes=sizes_of(256000, 3072, 24576, 28, 16, 8192),
    keys=(
        *llama_keys(kv_heads=16, head_dim=256),
        Key("attention_bias", "attention_bias", "flag", False),
    ),
    free=frozenset({"attention_bias"}),
    fixed={"norm_plus_one": True},
    derived={"embedding_scale": lambda dim: float(dim**0.5)},
    defaults={"activation": "gelu_tanh", "tie_embeddings": True, "norm_eps": 1e-6},
    default_activation="gelu_pytorch_tanh",
    # The first published files say "gelu" and mean its approximation, as transformers reads them.
    activations={"gelu": "gelu_tanh"},
    ties=True,
    written={"pad_token_id": 0},
    inert={
        "use_bidirectional_attention": (False,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "hidden_dropout": (0.0,),
    },
    # arXiv:2403.08295, table 1, and the HF configs of google/gemma-2b and -7b.
    presets={
        "gemma-2b": _gemma(2048, 18, 8, 1, 16384),
        "gemma-7b": _gemma(3072, 28, 16, 16, 24576),
    },
)
