"""EXAONE 4: norms after each sublayer, and rotation only in the layers with a window.

arXiv:2507.11407.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.errors import ConfigError, refusal
from meshwright.spec.families.base import Family, llama_keys, preset, sizes_of
from meshwright.spec.families.layers import LayerKeys
from meshwright.spec.families.olmo2 import olmo_modules

_WINDOW: Final = 4096
_INTERVAL: Final = 4
_LOCAL: Final[dict[str, Any]] = {"window": _WINDOW}
_PATTERN: Final[tuple[dict[str, Any], ...]] = (
    *(_LOCAL,) * (_INTERVAL - 1),
    {"rotary": False},
)
_LONGER: Final = {"kind": "llama3", "factor": 16.0, "original_context": 8192}


def _is_windowed(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a window where a file has no `layer_types`: all but each fourth."""
    interval = config.get("sliding_window_pattern", _INTERVAL)
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        rule = f"sliding_window_pattern = {interval!r} without layer_types"
        raise ConfigError(refusal(rule, legal=[_INTERVAL]))
    return (layer + 1) % interval != 0


EXAONE4: Final = Family(
    name="exaone4",
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    modules=olmo_modules(),
    sizes=sizes_of(102400, 4096, 16384, 32, 32, 2048),
    keys=llama_keys(kv_heads=32, eps=1e-5),
    free=frozenset({"layer_pattern"}),
    fixed={"norm_placement": "after", "qk_norm": "head"},
    defaults={"layer_pattern": _PATTERN},
    layers=LayerKeys(window=_WINDOW, is_windowed=_is_windowed, windows_rotate=True),
    inert={"hidden_dropout": (0.0,)},
    # HF configs of LGAI-EXAONE/EXAONE-4.0-1.2B and -32B.
    presets={
        "exaone-4.0-1.2b": preset(
            "exaone4",
            *(102400, 2048, 30, 32),
            n_kv_heads=8,
            ffn_dim=4096,
            context=65536,
            rope_theta=1e6,
            rope_scaling=_LONGER,
            tie_embeddings=True,
            layer_pattern=(),
        ),
        "exaone-4.0-32b": preset(
            "exaone4",
            *(102400, 5120, 64, 40),
            n_kv_heads=8,
            ffn_dim=27392,
            context=131072,
            rope_theta=1e6,
            rope_scaling=_LONGER,
        ),
    },
)
