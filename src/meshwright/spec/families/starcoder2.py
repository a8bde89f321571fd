"""StarCoder2: LayerNorm, a plain MLP, biases everywhere, a window in all layers or in none.

arXiv:2402.19173.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.spec.families.base import (
    Family,
    Key,
    llama_modules,
    one_bias,
    preset,
    sizes_of,
)
from meshwright.spec.families.layers import LayerKeys


def _starcoder2(dim: int, layers: int, heads: int, kv: int, ffn: int, **fields: Any) -> Any:
    return preset(
        "starcoder2",
        *(49152, dim, layers, heads),
        n_kv_heads=kv,
        ffn_dim=ffn,
        context=16384,
        layer_pattern=({"window": 4096},),
        **fields,
    )


def _check(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for what transformers' class does not read either."""
    for key, value in (("mlp_type", "default"), ("norm_type", "layer_norm")):
        if config.get(key, value) != value:
            raise ConfigError(f"{key} = {config[key]!r} must be {value!r}")


STARCODER2: Final = Family(
    name="starcoder2",
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    modules=llama_modules(
        **{"mlp.up": "model.layers.{}.mlp.c_fc", "mlp.down": "model.layers.{}.mlp.c_proj"}
    ),
    sizes=sizes_of(49152, 3072, 12288, 30, 24, 4096),
    keys=(
        Key("n_kv_heads", "num_key_value_heads", "size", 2),
        Key("head_dim", "head_dim", "size", "dim / n_heads"),
        Key("norm_eps", "norm_epsilon", "number", 1e-5),
        Key("attention_bias", "use_bias", "flag", True),
        Key("mlp_bias", "use_bias", "flag", True),
    ),
    free=frozenset({"attention_bias", "mlp_bias", "layer_pattern"}),
    fixed={"norm": "layer", "gated_mlp": False},
    defaults={
        "activation": "gelu_tanh",
        "tie_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    default_activation="gelu_pytorch_tanh",
    ties=True,
    layers=LayerKeys(),
    written={"residual_dropout": 0.0, "embedding_dropout": 0.0},
    # Dropout of its pretraining, which published files have: `model.dropout` sets it here.
    inert={
        "attention_dropout": (0.0, 0.1),
        "residual_dropout": (0.0, 0.1),
        "embedding_dropout": (0.0, 0.1),
        "hidden_dropout": (0.0,),
    },
    check=_check,
    check_written=one_bias("starcoder2"),
    # HF configs of bigcode/starcoder2-3b, -7b and -15b.
    presets={
        "starcoder2-3b": _starcoder2(3072, 30, 24, 2, 12288, rope_theta=999999.4420358813),
        "starcoder2-7b": _starcoder2(4608, 32, 36, 4, 18432, rope_theta=1e6),
        "starcoder2-15b": _starcoder2(
            *(6144, 40, 48, 4, 24576), rope_theta=100000.0, tie_embeddings=False
        ),
    },
)
