"""The mixture that `benchmarks.mixture` trains, and its steps. Imports nothing."""

from __future__ import annotations

from typing import Any

NOT_COUNTED = 3  # while allocators grow to what a step needs
BATCH, SEQ = 8, 512
IDS = 256  # of bytes, which `train` needs no tokenizer for
MODEL: dict[str, Any] = {
    "family": "mixtral",
    "vocab_size": 8192,
    "dim": 512,
    "n_layers": 4,
    "n_heads": 8,
    "n_kv_heads": 8,
    "head_dim": 64,
    "ffn_dim": 704,
    "experts": 8,
    "top_k": 2,
}
