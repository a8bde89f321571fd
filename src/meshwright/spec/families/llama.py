"""Llama: RMSNorm before each sublayer, rotated grouped-query attention, a gated MLP."""

from __future__ import annotations

import re
from typing import Any, Final

from meshwright.spec.families.base import (
    BIASES,
    Family,
    llama_keys,
    llama_modules,
    preset,
    sizes_of,
)


def _llama(vocab: int, dim: int, layers: int, heads: int, kv: int, ffn: int, **fields: Any) -> Any:
    return preset("llama", vocab, dim, layers, heads, n_kv_heads=kv, ffn_dim=ffn, **fields)


_LLAMA31_ROPE: Final = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_context": 8192,
}
_LLAMA32: Final = {
    "context": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {**_LLAMA31_ROPE, "factor": 32.0},
    "tie_embeddings": True,
}
_LLAMA3: Final = {"context": 8192, "rope_theta": 500000.0}
# Llama 3.1 was the first of the family with a context of 131,072.
_LLAMA31: Final = {"context": 131072, "rope_theta": 500000.0, "rope_scaling": _LLAMA31_ROPE}

LLAMA: Final = Family(
    name="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    modules=llama_modules(),
    buffers=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    sizes=sizes_of(32000, 4096, 11008, 32, 32, 2048),
    keys=(*llama_keys(), *BIASES),
    free=frozenset({"attention_bias", "mlp_bias"}),
    written={"pretraining_tp": 1},
    inert={"sliding_window": (), "hidden_dropout": (0.0,)},
    presets={
        # The built-in default: small enough for two CPU cores; its vocabulary is the tokenizer's.
        "demo": {"family": "llama", "dim": 256, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2},
        # arXiv:2307.09288, and the HF configs of meta-llama/Llama-2-*.
        "llama-2-7b": _llama(32000, 4096, 32, 32, 32, 11008, context=4096),
        "llama-2-13b": _llama(32000, 5120, 40, 40, 40, 13824, context=4096),
        "llama-2-70b": _llama(32000, 8192, 80, 64, 8, 28672, context=4096),
        # arXiv:2407.21783, table 3, and the HF configs of meta-llama/Meta-Llama-3-* and 3.1-*.
        "llama-3-8b": _llama(128256, 4096, 32, 32, 8, 14336, **_LLAMA3),
        "llama-3-70b": _llama(128256, 8192, 80, 64, 8, 28672, **_LLAMA3),
        "llama-3.1-8b": _llama(128256, 4096, 32, 32, 8, 14336, **_LLAMA31),
        "llama-3.1-70b": _llama(128256, 8192, 80, 64, 8, 28672, **_LLAMA31),
        "llama-3-405b": _llama(128256, 16384, 126, 128, 8, 53248, **_LLAMA31),
        # HF configs of meta-llama/Llama-3.2-1B and -3B.
        "llama-3.2-1b": _llama(128256, 2048, 16, 32, 8, 8192, **_LLAMA32),
        "llama-3.2-3b": _llama(128256, 3072, 28, 24, 8, 8192, **_LLAMA32),
        # arXiv:2401.02385.
        "tinyllama-1.1b": _llama(32000, 2048, 22, 32, 4, 5632, context=2048),
        # HF config of HuggingFaceTB/SmolLM2-135M.
        "smollm2-135m": _llama(
            49152, 576, 30, 9, 3, 1536, context=8192, rope_theta=100000.0, tie_embeddings=True
        ),
    },
)
