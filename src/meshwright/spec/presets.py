"""Model presets with the published sizes, each with its source.

A preset is a partial set of `ModelSpec` fields; `resolve` derives what it leaves out
(`n_kv_heads`, `head_dim`, `ffn_dim`, `context`).
"""

from __future__ import annotations

from typing import Any, Final


def _llama(
    vocab: int, dim: int, layers: int, heads: int, kv: int, ffn: int, **more: Any
) -> dict[str, Any]:
    sizes = {"vocab_size": vocab, "dim": dim, "n_layers": layers, "n_heads": heads}
    return {"family": "llama", **sizes, "n_kv_heads": kv, "ffn_dim": ffn, **more}


def _neox(vocab: int, dim: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": vocab, "dim": dim, "n_layers": layers, "n_heads": heads}
    return {"family": "neox", **sizes, **more}


def _pythia(dim: int, layers: int, heads: int, vocab: int = 50304) -> dict[str, Any]:
    return _neox(vocab, dim, layers, heads, context=2048, rotary_pct=0.25, parallel_residual=True)


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
# Llama 3.1 405B was the first of the family with a context of 131,072.
_LLAMA31: Final = {"context": 131072, "rope_theta": 500000.0, "rope_scaling": _LLAMA31_ROPE}

PRESETS: Final[dict[str, dict[str, Any]]] = {
    # The built-in default: small enough for two CPU cores; its vocabulary is the tokenizer's.
    "demo": {"family": "llama", "dim": 256, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2},
    # arXiv:2307.09288, and the HF configs of meta-llama/Llama-2-*.
    "llama-2-7b": _llama(32000, 4096, 32, 32, 32, 11008, context=4096),
    "llama-2-13b": _llama(32000, 5120, 40, 40, 40, 13824, context=4096),
    "llama-2-70b": _llama(32000, 8192, 80, 64, 8, 28672, context=4096),
    # arXiv:2407.21783, table 3, and the HF configs of meta-llama/Meta-Llama-3-* and 3.1-405B.
    "llama-3-8b": _llama(128256, 4096, 32, 32, 8, 14336, **_LLAMA3),
    "llama-3-70b": _llama(128256, 8192, 80, 64, 8, 28672, **_LLAMA3),
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
    # arXiv:2304.01373, table 1; the vocabulary is padded per size as in the HF configs.
    "pythia-14m": _pythia(128, 6, 4),
    "pythia-70m": _pythia(512, 6, 8),
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-410m": _pythia(1024, 24, 16),
    "pythia-1b": _pythia(2048, 16, 8),
    "pythia-1.4b": _pythia(2048, 24, 16),
    "pythia-2.8b": _pythia(2560, 32, 32),
    "pythia-6.9b": _pythia(4096, 32, 32, vocab=50432),
    "pythia-12b": _pythia(5120, 36, 40, vocab=50688),
    # arXiv:2204.06745, section 2.
    "gpt-neox-20b": _neox(
        50432,
        6144,
        44,
        64,
        context=2048,
        rotary_pct=0.25,
        parallel_residual=True,
        activation="gelu_tanh",
    ),
    # arXiv:2005.14165, table 2.1. Its learned positions (25M of 175B) are rotary ones here.
    "gpt3-175b": _neox(50257, 12288, 96, 96, context=2048, tie_embeddings=True),
}
