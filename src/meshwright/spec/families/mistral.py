"""Mistral without a window (7B v0.3, Nemo): Llama without biases. arXiv:2310.06825."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.errors import ConfigError, refusal
from meshwright.spec.families.base import (
    Family,
    llama_keys,
    llama_modules,
    no_windows,
    preset,
    sizes_of,
)


def _check(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a window, also the one that transformers takes by default."""
    no_windows(config)
    if "sliding_window" not in config:
        what = "a mistral config with no sliding_window has one of 4096, which is not supported"
        raise ConfigError(refusal(what, legal=["sliding_window = null"]))


MISTRAL: Final = Family(
    name="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    modules=llama_modules(),
    sizes=sizes_of(32000, 4096, 14336, 32, 32, 131072),
    keys=llama_keys(kv_heads=8),
    free=frozenset(),
    written={"sliding_window": None},
    inert={"sliding_window": (), "hidden_dropout": (0.0,)},
    check=_check,
    # HF configs of mistralai/Mistral-7B-v0.3 and Mistral-Nemo-Base-2407.
    presets={
        "mistral-7b-v0.3": preset(
            "mistral",
            *(32768, 4096, 32, 32),
            n_kv_heads=8,
            ffn_dim=14336,
            context=32768,
            rope_theta=1e6,
        ),
        "mistral-nemo-12b": preset(
            "mistral",
            *(131072, 5120, 40, 32),
            n_kv_heads=8,
            head_dim=128,
            ffn_dim=14336,
            context=131072,
            rope_theta=1e6,
        ),
    },
)
