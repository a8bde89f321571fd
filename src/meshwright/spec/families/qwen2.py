"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. arXiv:2412.15115."""

from __future__ import annotations

from typing import Any, Final

from meshwright.spec.families.base import (
    Family,
    llama_keys,
    llama_modules,
    preset,
    sizes_of,
)
from meshwright.spec.families.layers import LATE_WINDOWS


def _qwen2(dim: int, layers: int, heads: int, kv: int, ffn: int, **fields: Any) -> dict[str, Any]:
    fields = {"vocab_size": 152064, "rope_theta": 1e6, "norm_eps": 1e-6, "context": 131072} | fields
    return preset(
        "qwen2", fields.pop("vocab_size"), dim, layers, heads, n_kv_heads=kv, ffn_dim=ffn, **fields
    )


_SMALL: Final = {"vocab_size": 151936, "context": 32768, "tie_embeddings": True}

QWEN2: Final = Family(
    name="qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    modules=llama_modules(),
    sizes=sizes_of(151936, 4096, 22016, 32, 32, 32768),
    keys=llama_keys(kv_heads=32),
    free=frozenset({"layer_pattern"}),
    fixed={"attention_bias": True, "output_bias": False},
    defaults={"norm_eps": 1e-6},
    layers=LATE_WINDOWS,
    inert={"hidden_dropout": (0.0,)},
    # HF configs of Qwen/Qwen2.5-*.
    presets={
        "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, **_SMALL),
        "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, **{**_SMALL, "context": 131072}),
        "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11008, **_SMALL),
        "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944),
        "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13824, norm_eps=1e-5),
        "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27648, norm_eps=1e-5),
        "qwen2.5-72b": _qwen2(8192, 80, 64, 8, 29568, norm_eps=1e-5),
    },
)
