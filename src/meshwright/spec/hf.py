"""Between `ModelSpec` and the `config.json` of Hugging Face, by the tables of `spec.families`.

Rotary settings have two spellings: `rope_theta`, `rope_scaling`, `rotary_pct` and
`rotary_emb_base` until transformers 4, one `rope_parameters` since 5. Both are read, and must agree
where both stand; both are written. An absent key means what it means to transformers. Whatever
would change the model and has no place in `ModelSpec` is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from meshwright.errors import ConfigError, refusal
from meshwright.spec.families import FAMILIES
from meshwright.spec.families.base import Family
from meshwright.spec.families.unknown import refuse_model_type
from meshwright.spec.model import LARGEST, ModelSpec, RopeScaling

Found = tuple[str, Any]

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
}
_MODEL_TYPES: Final[Mapping[str, Family]] = {one.model_type: one for one in FAMILIES.values()}
_SIZE_KEYS: Final = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "context": "max_position_embeddings",
}
_THETA: Final = 10000.0


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the architecture that a Hugging Face `config.json` describes.

    Raises `ConfigError` naming the key and its value for another `model_type`, an unsupported
    feature, two spellings that disagree, a value of the wrong type and sizes that do not fit.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _MODEL_TYPES:
        raise ConfigError(refuse_model_type(model_type, list(_MODEL_TYPES)))
    family = _MODEL_TYPES[model_type]
    for key, inert in (_INERT | dict(family.inert)).items():
        value = config.get(key)
        if value is not None and value not in inert:
            legal = [repr(v) for v in inert] or ["null"]
            raise ConfigError(refusal(f"{key} = {value!r} is not supported", legal=legal))
    fields = _sizes(config, family.sizes)
    if not family.grouped or config.get("head_dim") is None:
        _check_heads(fields)
    family.check(config)
    fields |= _own_fields(config, family, fields)
    fields |= _rotary(config, family, fields["context"])
    fields |= {
        "activation": _activation(config, family.default_activation),
        "tie_embeddings": _flag(config, "tie_word_embeddings", False),
        "init_std": _number(config, "initializer_range", 0.02),
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
        **{theirs: fields[ours] for ours, theirs in _SIZE_KEYS.items()},
        "hidden_act": _ACTIVATION_NAMES[spec.activation],
        "attention_dropout": 0.0,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        **{key.theirs: fields[key.ours] for key in family.keys},
        **family.written,
    }
    return config | _rotary_keys(spec, family)


def _rotary_keys(spec: ModelSpec, family: Family) -> dict[str, Any]:
    scaling = spec.rope_scaling
    both: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        both = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            both |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_context,
            }
    new = both | {"rope_theta": spec.rope_theta}
    if "rotary_pct" in family.free:
        new["partial_rotary_factor"] = spec.rotary_pct
    # transformers before 4.43 reads the kind under "type".
    old = None if scaling is None else both | {"type": scaling.kind}
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": old,
        "rope_parameters": new,
        **dict.fromkeys(family.theta_keys, spec.rope_theta),
        **dict.fromkeys(family.rotary_keys, spec.rotary_pct),
    }


def _sizes(config: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, Any]:
    return {ours: _size(config, theirs, defaults[theirs]) for ours, theirs in _SIZE_KEYS.items()}


def _own_fields(
    config: Mapping[str, Any], family: Family, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Return what a family's own keys say, and what it has without one."""
    heads = sizes["n_heads"]
    derived = {"n_heads": heads, "dim / n_heads": sizes["dim"] // heads}
    read: Mapping[str, Callable[..., Any]] = {"size": _size, "number": _number, "flag": _flag}
    fields = {
        "n_kv_heads": heads,
        "head_dim": derived["dim / n_heads"],
        **family.features,
        **{key: value for key, value in family.defaults.items() if key in family.free},
    }
    for key in family.keys:
        default = derived.get(key.default, key.default)
        if config.get(key.theirs, default) is None and key.kind == "size":
            default = fields[key.ours]  # null, where absence means another number
        fields[key.ours] = read[key.kind](config, key.theirs, default)
    return {"family": family.name, **fields}


def _check_heads(sizes: Mapping[str, int]) -> None:
    if sizes["dim"] % sizes["n_heads"]:
        raise ConfigError(
            f"num_attention_heads = {sizes['n_heads']} must divide hidden_size = {sizes['dim']}"
        )


def _rotary(config: Mapping[str, Any], family: Family, context: int) -> dict[str, Any]:
    """Read the rotary settings under both spellings and hold them against each other."""
    new = _mapping(config, "rope_parameters")
    old = _mapping(config, "rope_scaling")
    theta = [_at(config, "rope_theta"), _at(new, "rope_theta", "rope_parameters")]
    share = [
        _at(config, "partial_rotary_factor"),
        _at(new, "partial_rotary_factor", "rope_parameters"),
    ]
    theta += [_at(config, key) for key in family.theta_keys]
    share += [_at(config, key) for key in family.rotary_keys if key != "partial_rotary_factor"]
    name, pct = _agree(share, family.rotary_pct)
    if "rotary_pct" not in family.free and pct != 1.0:
        what = f"{name} = {pct!r} is not supported for {family.model_type}"
        raise ConfigError(refusal(what, legal=[1.0]))
    _, base = _agree(theta, _THETA)
    return {
        "rope_theta": base,
        "rotary_pct": pct,
        "rope_scaling": _scaling(old, new, context),
    }


def _scaling(old: Mapping[str, Any], new: Mapping[str, Any], context: int) -> RopeScaling | None:
    kinds = [
        _at(source, key, at)
        for source, at in ((old, "rope_scaling"), (new, "rope_parameters"))
        for key in ("rope_type", "type")
    ]
    name, kind = _agree_words(kinds, "default")
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ConfigError(
            refusal(f"{name} = {kind!r} is not supported", legal=["default", "linear", "llama3"])
        )

    def number(key: str, default: float | None = None) -> float:
        found = [_at(old, key, "rope_scaling"), _at(new, key, "rope_parameters")]
        if default is None and all(value is None for _, value in found):
            raise ConfigError(f"{name} = {kind!r} needs the key {key!r} beside it")
        return _agree(found, default or 0.0)[1]

    factor = number("factor")
    if factor <= 0:
        raise ConfigError(f"the rope scaling's factor = {factor} must be above 0")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    low, high = number("low_freq_factor"), number("high_freq_factor")
    original = number("original_max_position_embeddings", float(context))
    if not 0 < low < high or not 1 <= original <= LARGEST or not original.is_integer():
        raise ConfigError(
            f"llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor and a whole "
            f"original_max_position_embeddings up to {LARGEST}, but they are {low}, {high} and "
            f"{original:g}"
        )
    return RopeScaling(
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=int(original),
    )


def _at(source: Mapping[str, Any], key: str, inside: str = "") -> Found:
    return (f"{inside}.{key}" if inside else key), source.get(key)


def _agree(found: Sequence[Found], default: float) -> tuple[str, float]:
    """Return the number that all spellings give, with the name of the first."""
    stated = [(name, _as_number(name, value)) for name, value in found if value is not None]
    for name, value in stated[1:]:
        if value != stated[0][1]:
            raise ConfigError(
                f"{stated[0][0]} = {stated[0][1]!r} and {name} = {value!r} must agree; keep one"
            )
    return stated[0] if stated else (found[0][0], default)


def _agree_words(found: Sequence[Found], default: str) -> tuple[str, object]:
    stated = [(name, value) for name, value in found if value is not None]
    for name, value in stated[1:]:
        if value != stated[0][1]:
            raise ConfigError(
                f"{stated[0][0]} = {stated[0][1]!r} and {name} = {value!r} must agree; keep one"
            )
    return stated[0] if stated else (found[0][0], default)


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} = {value!r} must be a table of rotary settings")
    for kind, own in value.items():
        if isinstance(own, Mapping):
            what = f"{key}.{kind} is a table: rotary settings of a kind of layer are not supported"
            raise ConfigError(refusal(what, legal=[f"one {key} of all layers"]))
    return value


def _activation(config: Mapping[str, Any], default: str) -> str:
    name = config.get("hidden_act")
    name = default if name is None else name
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(
            refusal(f"hidden_act = {name!r} is not supported", legal=list(_ACTIVATIONS))
        )
    return _ACTIVATIONS[name]


def _size(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} = {value!r} must be a whole number of at least 1")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    return default if value is None else _as_number(key, value)


def _as_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} = {value!r} must be a number")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"{key} = {value!r} must be true or false")
    return value


def _reason(where: Sequence[object], message: str) -> str:
    place = ".".join(str(part) for part in where)
    message = message.removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
