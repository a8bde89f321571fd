"""GPT-NeoX: LayerNorm, a plain MLP, biases, attention and MLP side by side. arXiv:2204.06745."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from meshwright.errors import ConfigError, refusal
from meshwright.spec.families.base import Family, Key, preset, sizes_of


def _neox(vocab: int, dim: int, layers: int, heads: int, **fields: Any) -> dict[str, Any]:
    return preset("neox", vocab, dim, layers, heads, context=2048, **fields)


def _pythia(dim: int, layers: int, heads: int, vocab: int = 50304) -> dict[str, Any]:
    return _neox(vocab, dim, layers, heads, rotary_pct=0.25, parallel_residual=True)


def _check(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for settings that transformers' class does not read either."""
    heads = config.get("num_attention_heads") or 64
    size = (config.get("hidden_size") or 6144) // heads
    for key, fixed in (("num_key_value_heads", heads), ("head_dim", size), ("mlp_bias", True)):
        value = config.get(key)
        if value is not None and value != fixed:
            raise ConfigError(
                refusal(f"{key} = {value!r} is not supported for gpt_neox", legal=[fixed])
            )


def _check_written(fields: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a model that transformers' class cannot build."""
    dim, heads, size = fields["dim"], fields["n_heads"], fields["head_dim"]
    if not fields["mlp_bias"]:
        raise ConfigError(
            "model.mlp_bias = false cannot be written as gpt_neox: its MLP always has biases"
        )
    if size * heads != dim:
        raise ConfigError(
            f"model.head_dim = {size} cannot be written as gpt_neox: it must be "
            f"model.dim / model.n_heads = {dim} / {heads}"
        )


_LAYER: Final = "gpt_neox.layers.{}"
_QKV: Final = f"{_LAYER}.attention.query_key_value"

NEOX: Final = Family(
    name="neox",
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    modules={
        "embed": "gpt_neox.embed_in",
        "attn_norm": f"{_LAYER}.input_layernorm",
        "attn.q": _QKV,
        "attn.k": _QKV,
        "attn.v": _QKV,
        "attn.o": f"{_LAYER}.attention.dense",
        "mlp_norm": f"{_LAYER}.post_attention_layernorm",
        "mlp.up": f"{_LAYER}.mlp.dense_h_to_4h",
        "mlp.down": f"{_LAYER}.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    by_head=dict.fromkeys(("attn.q", "attn.k", "attn.v"), "n_heads"),
    inert={"sliding_window": ()},
    buffers=re.compile(
        r"gpt_neox\.layers\.\d+\.attention\.(rotary_emb\.inv_freq|bias|masked_bias)"
    ),
    heads=("embed_out.weight", "lm_head.weight"),  # transformers 5 calls it by the second
    sizes=sizes_of(50432, 6144, 24576, 44, 64, 2048),
    keys=(
        Key("norm_eps", "layer_norm_eps", "number", 1e-5),
        Key("attention_bias", "attention_bias", "flag", True),
        Key("parallel_residual", "use_parallel_residual", "flag", True),
        Key("dropout", "hidden_dropout", "number", 0.0),
    ),
    free=frozenset({"attention_bias", "mlp_bias", "parallel_residual", "rotary_pct"}),
    fixed={"norm": "layer", "gated_mlp": False},
    defaults={"attention_bias": True, "mlp_bias": True, "activation": "gelu"},
    default_activation="gelu",
    grouped=False,
    rotary_pct=0.25,
    rotary_keys=("rotary_pct", "partial_rotary_factor"),
    theta_keys=("rotary_emb_base",),
    check=_check,
    check_written=_check_written,
    presets={
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
            50432, 6144, 44, 64, rotary_pct=0.25, parallel_residual=True, activation="gelu_tanh"
        ),
        # arXiv:2005.14165, table 2.1. Its learned positions (25M of 175B) are rotary ones here.
        "gpt3-175b": _neox(50257, 12288, 96, 96, tie_embeddings=True),
    },
)
