"""Converts between `ModelSpec` and Hugging Face's `config.json`, by the tables of `spec.families`.

An absent key has transformers' default. Anything that would change the model and has no place in
`ModelSpec` is refused, never dropped; so are architectures that no family here has.

Rotary settings have two spellings: `rope_theta`, `rope_scaling`, `rotary_pct` and `rotary_emb_base`
until transformers 4, one `rope_parameters` since 5, which some families have by kind of layer. Both
are read, and must agree if both are there; both are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from meshwright.errors import ConfigError, nearest, refusal
from meshwright.spec.families import FAMILIES
from meshwright.spec.families.base import FEATURES, OF_EXPERTS, Family, Key
from meshwright.spec.families.layers import StoredLayer, shortest_pattern
from meshwright.spec.hf_text import text_config
from meshwright.spec.kinds import LARGEST
from meshwright.spec.model import PLAIN_LAYER, LayerSpec, ModelSpec
from meshwright.spec.rotary import RopeScaling

_LARGEST_NUMBER: Final = 1e300
# Rows and columns of a block of numbers in fp8 that have one scale.
FP8_BLOCK: Final = 128
# A key as messages name it, and its value; None: absent.
Found = tuple[str, Any]


def size(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number of at least 1."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} = {value!r} must be a whole number of at least 1")
    return value


def count(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number of at least 0."""
    return 0 if config.get(key, default) == 0 else size(config, key, default)


def optional_size(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number of at least 1, or 0 if the key is null."""
    return 0 if config.get(key, default) is None else size(config, key, default)


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """Return a number."""
    value = config.get(key)
    return default if value is None else as_number(key, value)


def optional(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """Return a number, or None if the key is null."""
    value = config.get(key, default)
    return None if value is None else as_number(key, value)


def as_number(name: str, value: object) -> float:
    """Return a value that must be a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} = {value!r} must be a number")
    if not -_LARGEST_NUMBER < value < _LARGEST_NUMBER:  # nor one that is not a number
        raise ConfigError(f"{name} = {format(value, '.3g')} is beyond any that a config has")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return true or false."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"{key} = {value!r} must be true or false")
    return value


# How JSON has infinity: by Python's own extension, and by transformers 5.
_INFINITE: Final = (math.inf, "Infinity", {"__float__": "Infinity"})


def limits(config: Mapping[str, Any], key: str, default: None) -> tuple[float, float] | None:
    """Return the least and the largest value, or None for any that is not negative."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(f"{key} = {value!r} must be a list of 2 numbers")
    if as_number(key, value[0]) == 0 and value[1] in _INFINITE:
        return None
    return as_number(key, value[0]), as_number(key, value[1])


def at(source: Mapping[str, Any], key: str, inside: str = "") -> Found:
    """Return a key's full name, and its value in a table or None."""
    return (f"{inside}.{key}" if inside else key), source.get(key)


def agree(spellings: Sequence[Found], default: Any) -> Found:
    """Return the value that all spellings give, with the name of the first."""
    stated = [(name, value) for name, value in spellings if value is not None]
    for name, value in stated[1:]:
        if value != stated[0][1]:
            raise ConfigError(
                f"{stated[0][0]} = {stated[0][1]!r} and {name} = {value!r} must agree; keep one"
            )
    return stated[0] if stated else (spellings[0][0], default)


def agreed_number(spellings: Sequence[Found], default: float) -> tuple[str, float]:
    """Return the number that all spellings give, with the name of the first."""
    numbers = [(n, None if value is None else as_number(n, value)) for n, value in spellings]
    return agree(numbers, default)


# Tables of rotary settings of the same layers, each with its place in the config.
_Tables = Sequence[tuple[str, Mapping[str, Any]]]

_OLD: Final = "rope_scaling"
_NEW: Final = "rope_parameters"
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
_ORIGINAL: Final = "original_max_position_embeddings"
_LISTS: Final = ("short_factor", "long_factor")


def read_rotary(config: Mapping[str, Any], family: Family, context: int) -> dict[str, Any]:
    """Return `rope_theta`, `rotary_pct` and `rope_scaling` of all layers, or of full attention.

    `sliding_base` has the base of the others.
    """
    tables = [(_OLD, _table(config, _OLD)), _new(config, family, FULL)]
    if family.rope_absent and config.get(_OLD) is None and config.get(_NEW) is None:
        tables = [(_NEW, family.rope_absent)]
    theta = [at(config, "rope_theta"), *(at(table, "rope_theta", path) for path, table in tables)]
    share = "partial_rotary_factor"
    shares = [at(config, share), *(at(table, share, path) for path, table in tables)]
    theta += [at(config, key) for key in family.theta_keys]
    shares += [at(config, key) for key in family.rotary_keys if key != share]
    if family.rotary_dims_key is not None and config.get(family.rotary_dims_key) is not None:
        rotated = size(config, family.rotary_dims_key, 1)
        if config.get("head_dim") is None:
            raise ConfigError(f"{family.rotary_dims_key} = {rotated} needs the key 'head_dim'")
        shares.append((family.rotary_dims_key, rotated / size(config, "head_dim", 1)))
    name, pct = agreed_number(shares, family.rotary_pct)
    if "rotary_pct" not in family.free and pct != 1.0:
        rule = f"{name} = {pct!r} is not supported for {family.model_type}"
        raise ConfigError(refusal(rule, legal=[1.0]))
    _, base = agreed_number(theta, family.rope_theta)
    return {
        "rope_theta": base,
        "rotary_pct": pct,
        "rope_scaling": _Scaling(config, tables, family, context).read(),
    }


def sliding_base(config: Mapping[str, Any], family: Family) -> float | None:
    """Return the base of layers with a window, for `LayerSpec.rope_theta`.

    None: they rotate like the others, with their base and scaling. In a family with kinds of
    layers, `rope_theta` and `rope_scaling` apply only to the others, as in transformers 5.
    """
    if not family.kinds_of_layers:
        return None
    context = size(config, "max_position_embeddings", family.sizes["max_position_embeddings"])
    full = read_rotary(config, family, context)
    path, table = _new(config, family, SLIDING)
    keys = [] if family.sliding_theta_key is None else [at(config, family.sliding_theta_key)]
    default = family.rope_theta if family.sliding_theta is None else family.sliding_theta
    _, base = agreed_number([at(table, "rope_theta", path), *keys], default)
    scaling = _Scaling(config, [(path, table)], family, context).read()
    if base == full["rope_theta"] and scaling == full["rope_scaling"]:
        return None
    if scaling is not None:
        rule = f"{path} with rope_type = {scaling.kind!r} is not that of {FULL}"
        raise ConfigError(refusal(rule, legal=["'default'", f"the same as {_NEW}.{FULL}"]))
    return base


def rotary_keys(spec: ModelSpec, family: Family) -> dict[str, Any]:
    """Return a model's rotary settings as keys of `config.json`, in both spellings.

    Raises `ConfigError` for settings that transformers doesn't support in the family.
    """
    scaling, settings = spec.rope_scaling, _settings(spec)
    if scaling is not None and scaling.kind not in family.scalings:
        rule = f"model.rope_scaling.kind = {scaling.kind!r} cannot be written as {family.name}"
        raise ConfigError(refusal(rule, legal=["unset", *family.scalings]))
    new = settings | {"rope_theta": spec.rope_theta}
    if "rotary_pct" in family.free:
        new["partial_rotary_factor"] = spec.rotary_pct
    # transformers before 4.43 reads the kind under "type".
    old = None if scaling is None else settings | {"type": scaling.kind}
    original: dict[str, Any] = {}
    if scaling is not None and scaling.kind == "longrope" and old is not None:
        original = {_ORIGINAL: scaling.original_context}  # where transformers 4 reads it
        if family.original_context is not None:
            # There transformers 4 refuses all but the kind and the two lists.
            old = {key: value for key, value in old.items() if key not in ("rope_type", _ORIGINAL)}
    by_kind = _by_kind(spec, family, new)
    base = by_kind.get(SLIDING, new)["rope_theta"]
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": old,
        "rope_parameters": by_kind or new,
        **original,
        **dict.fromkeys(family.theta_keys, spec.rope_theta),
        **dict.fromkeys(family.rotary_keys, spec.rotary_pct),
        **({} if family.rotary_dims_key is None else {family.rotary_dims_key: spec.rotary_dim}),
        **({} if family.sliding_theta_key is None else {family.sliding_theta_key: base}),
    }


def _settings(spec: ModelSpec) -> dict[str, Any]:
    """Return the scaling as `rope_parameters` of transformers 5, without absent keys."""
    scaling = spec.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    settings: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return settings
    settings[_ORIGINAL] = scaling.original_context
    if scaling.kind == "llama3":
        names = ["low_freq_factor", "high_freq_factor"]
    elif scaling.kind == "yarn":
        names = ["beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"]
        settings |= {} if scaling.truncate else {"truncate": False}
    else:
        names = ["attention_factor"]
        settings |= {key: list(getattr(scaling, key)) for key in _LISTS}
        if scaling.factor == spec.context / scaling.original_context:
            del settings["factor"]
    values = {name: getattr(scaling, name) for name in names}
    return settings | {name: value for name, value in values.items() if value is not None}


def _by_kind(spec: ModelSpec, family: Family, full: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` by kind of layer; empty for a family that has one of all layers."""
    model = spec.rotary_base(PLAIN_LAYER)
    bases: dict[bool, set[float | None]] = {True: set(), False: set()}
    for layer in map(spec.layer, range(spec.n_layers)):
        if (base := spec.rotary_base(layer)) is not None:
            is_windowed = family.kinds_of_layers and layer.window is not None
            bases[is_windowed].add(None if base == model else base.theta)
    for is_windowed, thetas in bases.items():
        if len(thetas) > 1 or (not is_windowed and thetas - {None}):
            affected = f"layers {'with' if is_windowed else 'without'} a window"
            affected = affected if family.kinds_of_layers else "all layers"
            rule = f"model.layer_pattern cannot be written as {family.name}: it has one rope_theta "
            raise ConfigError(
                f"{rule}of {affected}, but the pattern has {sorted(map(str, thetas))}"
            )
    if not family.kinds_of_layers:
        return {}
    sliding_theta = next(iter(bases[True]), None)
    sliding = (
        dict(full)
        if sliding_theta is None
        else {"rope_type": "default", "rope_theta": sliding_theta}
    )
    outer = {"truncate": False} if full.get("truncate") is False else {}
    return {FULL: dict(full), SLIDING: sliding, **outer}


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table of settings of all layers; empty where there is none."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} = {value!r} must be a table of rotary settings")
    for kind, setting in value.items():
        if isinstance(setting, Mapping):
            rule = f"{key}.{kind} is a table: rotary settings of a kind of layer are not supported"
            raise ConfigError(refusal(rule, legal=[f"one {key} of all layers"]))
    return value


def _new(config: Mapping[str, Any], family: Family, kind: str) -> tuple[str, Mapping[str, Any]]:
    """Return the `rope_parameters` of a kind of layer, and their place."""
    if not family.kinds_of_layers:
        return _NEW, _table(config, _NEW)
    value = config.get(_NEW)
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{_NEW} = {value!r} must be a table of rotary settings")
    if unknown := sorted(set(map(str, value)) - {FULL, SLIDING, "truncate"}):
        rule = f"{_NEW} of {family.model_type} has {unknown} outside of a kind of layer"
        raise ConfigError(refusal(rule, legal=[f"{_NEW}.{FULL}", f"{_NEW}.{SLIDING}"]))
    return f"{_NEW}.{kind}", _table({f"{_NEW}.{kind}": value.get(kind)}, f"{_NEW}.{kind}")


class _Scaling:
    """Reads the scaling of some layers out of the tables that have it."""

    def __init__(
        self, config: Mapping[str, Any], tables: _Tables, family: Family, context: int
    ) -> None:
        self.config, self.tables, self.family, self.context = config, tables, family, context
        kinds = [
            (f"{path}.{key}", family.rope_names.get(str(table.get(key)), table.get(key)))
            for path, table in tables
            for key in ("rope_type", "type")
        ]
        self.name, self.kind = agree(kinds, "default")

    def read(self) -> RopeScaling | None:
        """Return the scaling; None if there is none."""
        if self.kind == "default":
            return None
        if self.kind not in self.family.scalings:
            rule = f"{self.name} = {self.kind!r} is not supported"
            raise ConfigError(refusal(rule, legal=["default", *self.family.scalings]))
        fields: dict[str, Any] = {"kind": self.kind}
        if self.kind != "linear":
            fields["original_context"] = self._original()
        if self.kind == "yarn":
            for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
                fields[key] = self._number(key) or default  # also of 0, as in transformers
            fields |= {key: self._number(key) or None for key in ("mscale", "mscale_all_dim")}
            fields["truncate"] = self._truncates()
        if self.kind == "longrope":
            fields |= {key: self._list(key) for key in _LISTS}
        if self.kind in ("yarn", "longrope"):
            fields["attention_factor"] = self._number("attention_factor")
        else:
            self._need("factor")
        if self.kind == "yarn" and not any("factor" in table for _, table in self.tables):
            self._need("factor")
        factor = self._number("factor")
        fields["factor"] = self.context / fields["original_context"] if factor is None else factor
        if fields["factor"] <= 0:
            raise ConfigError(f"the rope scaling's factor = {fields['factor']} must be above 0")
        if self.kind == "llama3":
            fields |= self._bounds(fields["original_context"])
        try:
            return RopeScaling(**fields)
        except ValidationError as error:
            reasons = "; ".join(_rotary_reason(item) for item in error.errors())
            raise ConfigError(f"{self.name} = {self.kind!r} does not hold: {reasons}") from error

    def _number(self, key: str) -> float | None:
        spellings = [at(table, key, path) for path, table in self.tables]
        return None if all(v is None for _, v in spellings) else agreed_number(spellings, 0.0)[1]

    def _need(self, key: str) -> None:
        if all(table.get(key) is None for _, table in self.tables):
            raise ConfigError(f"{self.name} = {self.kind!r} needs the key {key!r} beside it")

    def _original(self) -> int:
        """Return the context that was trained with; where no key has it, the model's whole one."""
        top = self.config.get(_ORIGINAL)
        spellings = [(_ORIGINAL, self.family.original_context if top is None else top)]
        spellings += [at(table, _ORIGINAL, path) for path, table in self.tables]
        name, value = agreed_number(spellings, float(self.context))
        if not 1 <= value <= LARGEST or not value.is_integer():
            raise ConfigError(
                f"{name} = {value:g} of {self.kind} rope scaling must be a whole number from 1 up "
                f"to {LARGEST}"
            )
        return int(value)

    def _bounds(self, original: int) -> dict[str, float]:
        for key in ("low_freq_factor", "high_freq_factor"):
            self._need(key)
        low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
        assert low is not None
        assert high is not None
        if not 0 < low < high:
            raise ConfigError(
                f"llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, but they are "
                f"{low} and {high}"
            )
        return {"low_freq_factor": low, "high_freq_factor": high}

    def _truncates(self) -> bool:
        """Return whether bounds are rounded; transformers does not look for it by kind of layer."""
        spellings = [
            (f"{path}.truncate", table["truncate"] or False)  # null is false there
            for path, table in self.tables
            if "truncate" in table
        ]
        if self.family.kinds_of_layers:
            outer = (self.config.get(_NEW) or {}).get("truncate", True)
            spellings.insert(0, (f"{_NEW}.truncate", outer or False))
        name, value = agree(spellings, True) if spellings else ("truncate", True)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} = {value!r} must be true or false")
        return value

    def _list(self, key: str) -> tuple[float, ...]:
        self._need(key)
        spellings = []
        for path, table in self.tables:
            name, value = at(table, key, path)
            if value is not None and not isinstance(value, list | tuple):
                raise ConfigError(f"{name} = {value!r} must be a list of numbers")
            numbers = None
            if value is not None:
                numbers = tuple(as_number(f"{name}.{i}", item) for i, item in enumerate(value))
            spellings.append((name, numbers))
        listed: tuple[float, ...] = agree(spellings, ())[1]
        return listed


def _rotary_reason(item: Mapping[str, Any]) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    key = ".".join(str(part) for part in item["loc"])
    return f"{key} = {item['input']!r}: {message}" if key else message


# Model types of transformers: the family that is nearest, and how it differs from that.
_DIFFERS: Final = {
    "apertus": ("llama", "an activation with parameters (xIELU)"),
    "cohere2": ("neox", "a LayerNorm without biases"),
    "deepseek_v2": ("deepseek_v3", "a router of softmaxes"),
    "deepseek_v32": ("deepseek_v3", "sparse attention"),
    "ernie4_5_moe": ("deepseek_v3", "a router of softmaxes and adjacent rotated pairs"),
    "gpt2": ("neox", "learned positions"),
    "hunyuan_v1_dense": ("qwen3", "norms of heads after the rotation"),
    "llama4_text": ("qwen2_moe", "attention in chunks"),
    "nemotron": ("neox", "a LayerNorm of 1 + weight"),
}


def refuse_model_type(model_type: object, known: Iterable[str]) -> str:
    """Return the message about an unknown `model_type`."""
    rule = f"model_type = {model_type!r} is not supported"
    if isinstance(model_type, str) and model_type in _DIFFERS:
        like, difference = _DIFFERS[model_type]
        return refusal(f"{rule}: it is like {like}, with {difference}", legal=[like])
    legal = nearest(model_type, known, 3) if isinstance(model_type, str) else []
    return refusal(rule, legal=legal or sorted(known))


_ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
_ACTIVATION_NAMES: Final = {
    **{name: name for name in ("silu", "gelu", "relu2")},
    "gelu_tanh": "gelu_pytorch_tanh",
}
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
                delta=recurrence == "delta",
                mamba=recurrence == "mamba",
            )
            for window, rotary, dense, recurrence in family.layers.read(config, fields["n_layers"])
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
        **{
            key.hf_key: _written(key, fields[key.ours], spec)
            for key in family.keys
            if (spec.experts or key.ours not in OF_EXPERTS)
            and not (key.kind == "limits" and fields[key.ours] is None)
        },
        **family.written,
    }
    if family.layers is not None:
        layers = [
            # A key of their own says how many of the first layers are dense.
            StoredLayer(
                layer.window,
                layer.rotary,
                layer.dense and index >= spec.dense_layers,
                "delta" if layer.delta else "mamba" if layer.mamba else None,
            )
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
    if key.kind == "limits":
        return list(value)
    if key.kind == "expansion":
        inner = spec.mamba_heads * value
        if inner % spec.dim:
            rule = f"model.mamba_heads = {spec.mamba_heads} x model.mamba_head_dim = {value} cannot"
            rule += f" be written as {key.hf_key}, a multiple of model.dim = {spec.dim}"
            raise ConfigError(rule)
        return inner // spec.dim
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
        "expansion": lambda *args: size(*args) * sizes["dim"] // fields["mamba_heads"],
        "head of expansion": lambda config, key, _: _head_of_expansion(
            config, key, fields["mamba_head_dim"]
        ),
        "limits": limits,
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
    if not fields["experts"]:
        fields |= {key: FEATURES[key] for key in OF_EXPERTS if key in family.free}
    if family.head_dim_parts:
        fields["head_dim"] = sum(fields[part] for part in family.head_dim_parts)
    return {"family": family.name, **fields}


def _head_of_expansion(config: Mapping[str, Any], key: str, expanded: int) -> int:
    """Return the size of a head of Mamba-2; "auto": that of the width of all."""
    if config.get(key) in (None, "auto"):
        return expanded
    head_dim = size(config, key, expanded)
    if head_dim != expanded:
        rule = f"{key} = {head_dim} must be mamba_expand x hidden_size / mamba_n_heads"
        raise ConfigError(refusal(rule, legal=[expanded]))
    return head_dim


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
