"""Phi-3 and Phi-4: Llama whose projections of one input are stored as one.

arXiv:2404.14219, arXiv:2412.08905.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.spec.families.base import (
    Family,
    Key,
    llama_modules,
    preset,
    sizes_of,
)
from meshwright.spec.families.layers import LayerKeys


def _check_written(fields: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a head size other than dim / heads: its config has no key for it."""
    dim, heads, size = fields["dim"], fields["n_heads"], fields["head_dim"]
    if size * heads != dim:
        raise ConfigError(
            f"model.head_dim = {size} cannot be written as phi3: it must be "
            f"model.dim / model.n_heads = {dim} / {heads}"
        )


_QKV: Final = "model.layers.{}.self_attn.qkv_proj"
_GATE_UP: Final = "model.layers.{}.mlp.gate_up_proj"

PHI3: Final = Family(
    name="phi3",
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    modules=llama_modules(
        **{f"attn.{proj}": _QKV for proj in "qkv"},
        **{f"mlp.{proj}": _GATE_UP for proj in ("gate", "up")},
    ),
    sizes=sizes_of(32064, 3072, 8192, 32, 32, 4096),
    keys=(
        Key("n_kv_heads", "num_key_value_heads", "size", "n_heads"),
        Key("norm_eps", "rms_norm_eps", "number", 1e-5),
    ),
    free=frozenset({"rotary_pct", "layer_pattern"}),
    rotary_keys=("partial_rotary_factor",),
    scalings=("longrope",),
    rope_names={"su": "longrope", "yarn": "longrope"},
    original_context=4096,
    written={"pad_token_id": None},  # else transformers pads with id 32000
    inert={"resid_pdrop": (0.0,), "embd_pdrop": (0.0,)},
    check_written=_check_written,
    layers=LayerKeys(),
    # HF configs of microsoft/Phi-3-mini-4k-instruct and phi-4.
    presets={
        "phi-3-mini": preset(
            "phi3",
            *(32064, 3072, 32, 32),
            n_kv_heads=32,
            ffn_dim=8192,
            context=4096,
            layer_pattern=({"window": 2047},),
        ),
        "phi-4": preset(
            "phi3",
            *(100352, 5120, 40, 40),
            n_kv_heads=10,
            ffn_dim=17920,
            context=16384,
            rope_theta=250000.0,
        ),
    },
)
