"""Qwen3, dense: Llama with an RMSNorm on each head of queries and keys. arXiv:2505.09388."""

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
from meshwright.spec.families.layers import LATE_WINDOWS


def _qwen3(dim: int, layers: int, heads: int, kv: int, ffn: int, **fields: Any) -> dict[str, Any]:
    fields = {"head_dim": 128, "rope_theta": 1e6, "norm_eps": 1e-6, "context": 40960} | fields
    return preset("qwen3", 151936, dim, layers, heads, n_kv_heads=kv, ffn_dim=ffn, **fields)


QWEN3: Final = Family(
    name="qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    modules=llama_modules(
        **{f"attn.{proj}_norm": f"model.layers.{{}}.self_attn.{proj}_norm" for proj in "qk"}
    ),
    sizes=sizes_of(151936, 4096, 22016, 32, 32, 32768),
    keys=(
        *llama_keys(kv_heads=32, head_dim=128),
        Key("attention_bias", "attention_bias", "flag", False),
    ),
    free=frozenset({"attention_bias", "layer_pattern"}),
    fixed={"qk_norm": "head"},
    defaults={"norm_eps": 1e-6},
    layers=LATE_WINDOWS,
    inert={"hidden_dropout": (0.0,)},
    # arXiv:2505.09388, table 1, and the HF configs of Qwen/Qwen3-*.
    presets={
        "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tie_embeddings=True),
        "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, tie_embeddings=True),
        "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, tie_embeddings=True),
        "qwen3-8b": _qwen3(4096, 36, 32, 8, 12288),
        "qwen3-14b": _qwen3(5120, 40, 40, 8, 17408),
        "qwen3-32b": _qwen3(5120, 64, 64, 8, 25600),
    },
)
