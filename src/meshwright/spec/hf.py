"""Converts between `ModelSpec` and Hugging Face's `config.json`, by the tables of `spec.families`.

An absent key has transformers' default. Anything that would change the model and has no place in
`ModelSpec` is refused, never dropped. `spec.hf_rotary` handles rotary settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from meshwright.errors import ConfigError, refusal
from meshwright.spec.families import FAMILIES
from meshwright.spec.families.base import Family, Key
from meshwright.spec.families.layers import StoredLayer, shortest_pattern
from meshwright.spec.families.unknown import refuse_model_type
from meshwright.spec.hf_rotary import read_rotary, rotary_keys, sliding_base
from meshwright.spec.hf_text import text_config
from meshwright.spec.hf_values import (
    FP8_BLOCK,
    agree,
    at,
    count,
    flag,
    number,
    optional,
    optional_size,
    size,
)
from meshwright.spec.model import PLAIN_LAYER, LayerSpec, ModelSpec

_ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ACTIVATION_NAMES: Final = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
# The key, and the values under which it changes nothing (beside its absence and null).
_INERT: Final[dict[str, tuple[object, ...]]] = {
    "pretraining_tp": (1,),
    "quantization_config": (),
    "attention_dropout": (0.0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
}
_MODEL_TYPES: Final[Mapping[str, Family]] = {
    family.model_type: family for family in FAMILIES.values()
}
_SIZE_KEYS: Final = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "context": "max_position_embeddings",
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the architecture that a Hugging Face `config.json` describes.

    Of a model with images, it is the text model.
    Raises `ConfigError` naming the key and its value for another `model_type`, an unsupported
    feature, two spellings that disagree, a value of the wrong type and sizes that do not fit.
    """
    config = text_config(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _MODEL_TYPES:
        raise ConfigError(refuse_model_type(model_type, list(_MODEL_TYPES)))
    family = _MODEL_TYPES[model_type]
    for key, alias in family.renamed.items():
        name, value = agree([at(config, key), at(config, alias)], None)
        if name == alias:
            config = {**config, key: value}
    for key, inert in (_INERT | dict(family.inert)).items():
        value = config.get(key)
        if key == "quantization_config" and _is_read(value, family):
            continue
        if value is not None and value not in inert:
            legal = [repr(v) for v in inert] or ["null"]
            raise ConfigError(refusal(f"{key} = {value!r} is not supported", legal=legal))
    fields = _sizes(config, family.sizes)
    if _divides_heads(config, family):
        _check_heads(fields)
    family.check(config)
    fields |= _own_fields(config, family, fields)
    fields |= read_rotary(config, family, fields["context"])
    if family.layers is not None:
        base = sliding_base(config, family)
        layers = [
            LayerSpec(
                window=window,
                rotary=rotary,
                rope_theta=None if window is None else base,
                dense=dense,
            )
            for window, rotary, dense in family.layers.read(config, fields["n_layers"])
        ]
        pattern = shortest_pattern(layers)
        fields["layer_pattern"] = () if pattern == (PLAIN_LAYER,) else pattern
    fields |= {
        "activation": _activation(config, family),
        "tie_embeddings": flag(config, "tie_word_embeddings", family.ties),
        "init_std": number(config, "initializer_range", 0.02),
    }
    try:
        return ModelSpec(**fields)
    except ValidationError as error:
        reasons = "; ".join(_reason(item["loc"], item["msg"]) for item in error.errors())
        raise ConfigError(f"the {model_type} config describes no valid model: {reasons}") from error


def hf_config(
    spec: ModelSpec,
    *,
    dtype: str = "float32",
    bos_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the `config.json` of `spec`, readable by transformers 4 and 5.

    `dtype` is the name of the stored weights' type, such as `bfloat16`. Raises `ConfigError` for
    a model that transformers cannot build, such as a NeoX one without MLP biases. `spec.dropout` is
    left out where a family has no key for it: it only matters to training.
    """
    family, fields = FAMILIES[spec.family], dict(spec)
    family.check_written(fields)
    eos = list(eos_token_id) if isinstance(eos_token_id, Sequence) else eos_token_id
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{hf_key: fields[ours] for ours, hf_key in _SIZE_KEYS.items()},
        family.activation_key: _ACTIVATION_NAMES[spec.activation],
        "attention_dropout": 0.0,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        **{key.hf_key: _written(key, fields[key.ours], spec) for key in family.keys},
        **family.written,
    }
    if family.layers is not None:
        layers = [
            # A key of their own says how many of the first layers are dense.
            StoredLayer(layer.window, layer.rotary, layer.dense and index >= spec.dense_layers)
            for index, layer in enumerate(map(spec.layer, range(spec.n_layers)))
        ]
        config |= family.layers.write(layers, family.name)
    return config | rotary_keys(spec, family)


def _is_read(quantisation: object, family: Family) -> bool:
    """Whether quantised weights can be read, as the numbers that they stand for."""
    if not isinstance(quantisation, Mapping):
        return False
    method = quantisation.get("quant_method")
    if method == "fp8":
        return quantisation.get("weight_block_size") == [FP8_BLOCK, FP8_BLOCK]
    return method in family.quantised


def _written(key: Key, value: Any, spec: ModelSpec) -> Any:
    """Return the value that `config.json` has for a field."""
    if key.kind == "optional size":
        return value or None
    if key.kind == "norm of heads":
        return value == "head"
    if key.kind == "experts":
        width = spec.expert_width
        if value == 0 or value % width:
            rule = f"model.{key.ours} = {value} cannot be written as {key.hf_key}, a number of "
            legal = [width * n for n in (value // width, value // width + 1) if n]
            raise ConfigError(refusal(f"{rule}experts {width} wide", legal=legal))
        return value // width
    if key.kind != "inverse root":
        return value
    inverse = round(value**-2)
    if inverse < 1 or inverse**-0.5 != value:
        rule = f"model.{key.ours} = {value} cannot be written as {key.hf_key}"
        raise ConfigError(
            refusal(rule, legal=[f"{n} ** -0.5" for n in (inverse, inverse + 1) if n])
        )
    return inverse


def _sizes(config: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, Any]:
    return {ours: size(config, hf_key, defaults[hf_key]) for ours, hf_key in _SIZE_KEYS.items()}


def _own_fields(
    config: Mapping[str, Any], family: Family, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Return the fields that a family's keys set, with its defaults where keys are absent."""
    heads = sizes["n_heads"]
    derived = {"n_heads": heads, "dim / n_heads": sizes["dim"] // heads}
    read: Mapping[str, Callable[..., Any]] = {
        "size": size,
        "number": number,
        "flag": flag,
        "optional": optional,
        "inverse root": lambda *args: size(*args) ** -0.5,
        "count": count,
        "optional size": optional_size,
        "experts": lambda *args: size(*args) * fields["expert_ffn_dim"],
        "norm of heads": lambda *args: "head" if flag(*args) else "none",
    }
    fields = {
        "n_kv_heads": heads,
        "head_dim": derived["dim / n_heads"],
        **family.features,
        **family.of_width(sizes["dim"]),
        **{key: value for key, value in family.defaults.items() if key in family.free},
    }
    for key in family.keys:
        default = derived.get(key.default, key.default)
        if config.get(key.hf_key, default) is None and key.kind == "size":
            default = fields[key.ours]  # null, where absence means another number
        fields[key.ours] = read[key.kind](config, key.hf_key, default)
    if family.head_dim_parts:
        fields["head_dim"] = sum(fields[part] for part in family.head_dim_parts)
    return {"family": family.name, **fields}


def _divides_heads(config: Mapping[str, Any], family: Family) -> bool:
    """Whether the size of a head is the width divided by the number of heads."""
    defaults = {key.ours: key.default for key in family.keys}
    derived = "dim / n_heads"
    absent = None if defaults.get("head_dim", derived) == derived else defaults["head_dim"]
    is_unset = config.get("head_dim", absent) is None
    return not family.head_dim_parts and (not family.grouped or is_unset)


def _check_heads(sizes: Mapping[str, int]) -> None:
    if sizes["dim"] % sizes["n_heads"]:
        raise ConfigError(
            f"num_attention_heads = {sizes['n_heads']} must divide hidden_size = {sizes['dim']}"
        )


def _activation(config: Mapping[str, Any], family: Family) -> str:
    name = config.get(family.activation_key)
    name = family.default_activation if name is None else name
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        rule = f"{family.activation_key} = {name!r} is not supported"
        raise ConfigError(refusal(rule, legal=list(_ACTIVATIONS)))
    return family.activations.get(name, _ACTIVATIONS[name])


def _reason(path: Sequence[object], message: str) -> str:
    key = ".".join(str(part) for part in path)
    message = message.removeprefix("Value error, ")
    return f"{key}: {message}" if key else message
