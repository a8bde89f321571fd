"""Converts rotary settings between `ModelSpec` and Hugging Face's `config.json`.

They have two spellings: `rope_theta`, `rope_scaling`, `rotary_pct` and `rotary_emb_base` until
transformers 4, one `rope_parameters` since 5, which some families have by kind of layer. Both are
read, and must agree if both are there; both are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from meshwright.errors import ConfigError, refusal
from meshwright.spec.base import LARGEST
from meshwright.spec.families.base import Family
from meshwright.spec.hf_values import agree, agreed_number, as_number, at, size
from meshwright.spec.model import PLAIN_LAYER, ModelSpec
from meshwright.spec.rotary import RopeScaling

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
            reasons = "; ".join(_reason(item) for item in error.errors())
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


def _reason(item: Mapping[str, Any]) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    key = ".".join(str(part) for part in item["loc"])
    return f"{key} = {item['input']!r}: {message}" if key else message
