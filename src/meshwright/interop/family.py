"""Finds the model family of Meshwright that has all features of another system's model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshwright.interop.source import ImportSource
from meshwright.spec.dump import toml_value
from meshwright.spec.families import FAMILIES
from meshwright.spec.families.base import FEATURES, Family
from meshwright.spec.families.layers import StoredLayer, shortest_pattern

# Features that a model's layers determine, together with the family.
_OF_LAYERS: Final = ("layer_pattern", "dense_layers")
# Fields that are set by features of other names, and what the readers themselves set.
_FIELDS: Final = {
    "norm": ("norm", "family"),
    "window": ("layer_pattern",),
    "rotary": ("layer_pattern",),
    "dense": _OF_LAYERS,
    "expert_ffn_dim": ("expert_ffn_dim", "ffn_dim"),
}
_NO_FEATURES: Final = ("n_kv_heads", "rope_scaling")
# How much a misfit counts for the choice of the nearest family; others count 1, and more if the
# other system has no key for the feature.
_WEIGHTS: Final = {
    "norm": 10,
    "kv_lora_rank": 5,
    "router_scores": 5,
    "attention_sinks": 5,
    "experts": 6,
}
_NO_KEY: Final = 5
_OF_EXPERTS: Final = (
    *("top_k", "expert_ffn_dim", "norm_top_k", "expert_bias", "shared_ffn_dim", "shared_gate"),
    *("router_scores", "expert_groups", "top_groups", "routed_scale", "dense"),
)


@dataclass(frozen=True)
class ForeignModel:
    """A model of another system in Meshwright's terms, before its family is known.

    `features` are values of `FEATURES`; missing ones are Llama's. `keys` has, for each feature and
    for "window", "rotary" and "dense" of `layers`, the other system's keys that set it, the
    decisive one first. `is_grouped` is whether heads share keys and values (GQA). `scaling` is the
    kind of rope scaling, or None.
    """

    features: Mapping[str, Any]
    keys: Mapping[str, Sequence[str]]
    layers: Sequence[StoredLayer] = ()
    is_grouped: bool = False
    scaling: str | None = None

    def value(self, feature: str) -> Any:
        """Return the value of a feature, by default Llama's."""
        return self.features.get(feature, FEATURES.get(feature))


def take_family(source: ImportSource, model: ForeignModel) -> Family:
    """Set `model.family` and the features that vary within this family; return the family.

    If no family has all features, the nearest is used, and keys that it cannot express are marked
    as unsupported.
    """
    misfits = {name: _misfits(family, model) for name, family in FAMILIES.items()}
    name = min(misfits, key=lambda name: sum(_weight(model, m) for m in misfits[name]))
    family, fields = FAMILIES[name], _fields(FAMILIES[name], model)
    for misfit in misfits[name]:
        _refuse(source, family, model, misfit)
        fields = {key: value for key, value in fields.items() if key not in _set_by(misfit)}
    for field, value in {"family": name, **fields}.items():
        setting = [key for key, feature in _setters(model) if field in _set_by(feature)]
        if not any(key in source.values for key in setting):
            reason = f"the default of {setting[0]}" if setting else f"as {name} can have it"
            source.fill(f"model.{field}", value, reason)
    fields["family"] = name
    for key in dict.fromkeys(key for key, _ in _setters(model)):
        sets = [field for k, feature in _setters(model) if k == key for field in _set_by(feature)]
        to = {f"model.{field}": fields[field] for field in sets if field in fields}
        is_same = not to or list(to.values()) == [source.values.get(key)]
        (source.honour if is_same else source.translate)(key, to, f"of {name}")
    return family


def _weight(model: ForeignModel, misfit: str) -> int:
    return _WEIGHTS.get(misfit, 1 if misfit in model.keys else _NO_KEY)


def _setters(model: ForeignModel) -> list[tuple[str, str]]:
    """Return (key of the other system, feature) for each key that sets a feature."""
    return [
        (key, feature)
        for feature, keys in model.keys.items()
        for key in keys
        if feature not in _NO_FEATURES
    ]


def _set_by(feature: str) -> tuple[str, ...]:
    """Return the fields of `ModelSpec` that a feature sets."""
    return _FIELDS.get(feature, (feature,))


def _fields(family: Family, model: ForeignModel) -> dict[str, Any]:
    """Return the `ModelSpec` fields that vary within the family, except those that are None."""
    fields = {key: model.value(key) for key in family.free if key not in _OF_LAYERS}
    layers = list(model.layers)
    if "dense_layers" in family.free:
        fields["dense_layers"] = sum(layer.dense for layer in layers)
        layers = [layer._replace(dense=False) for layer in layers]
    if "layer_pattern" in family.free:
        pattern = [_layer(layer) for layer in shortest_pattern(layers)]
        fields["layer_pattern"] = pattern if any(pattern) else []
    if model.value("experts") and "expert_ffn_dim" not in family.free:
        fields["ffn_dim"] = model.value("expert_ffn_dim")
    return {key: value for key, value in fields.items() if value is not None}


def _layer(layer: StoredLayer) -> dict[str, Any]:
    """Return the fields of a layer that differ from their defaults."""
    return {
        key: value
        for key, value in layer._asdict().items()
        if value != StoredLayer._field_defaults[key]
    }


def _misfits(family: Family, model: ForeignModel) -> list[str]:
    """Return the features of the model that no model of the family has."""
    fixed = {key: family.fixed.get(key, value) for key, value in FEATURES.items()}
    free = {*family.free, *_OF_LAYERS, "output_bias", "expert_ffn_dim"}
    names = [k for k, value in fixed.items() if k not in free and model.value(k) != value]
    names += [key for key in family.derived if key not in names]
    output = fixed["output_bias"]
    if _output_bias(model) != (model.value("attention_bias") if output is None else output):
        names.append("output_bias")
    if "experts" in family.free and not model.value("experts"):
        names.append("experts")
    if family.head_dim_parts and not model.value("kv_lora_rank"):
        names.append("kv_lora_rank")
    if not family.grouped and model.is_grouped:
        names.append("n_kv_heads")
    if model.scaling is not None and model.scaling not in family.scalings:
        names.append("rope_scaling")
    names += _misfit_layers(family, model)
    if "experts" in names:
        return [name for name in names if name not in _OF_EXPERTS]
    return names


def _output_bias(model: ForeignModel) -> bool:
    output = model.value("output_bias")
    return bool(model.value("attention_bias") if output is None else output)


def _misfit_layers(family: Family, model: ForeignModel) -> Iterable[str]:
    """Yield the features of layers that the family lacks: "window", "rotary" or "dense"."""
    keys, layers = family.layers, model.layers
    windows = {layer.window for layer in layers}
    has_window = any(window is not None for window in windows)
    is_mixed = len(windows) > 1 and (keys is None or keys.is_windowed is None)
    if has_window and ("layer_pattern" not in family.free or is_mixed):
        yield "window"
    if not all(layer.rotary for layer in layers) and (keys is None or not keys.rotates):
        yield "rotary"
    dense = [layer.dense for layer in layers]
    if any(dense) and not (keys is not None and keys.sparse):
        is_leading = not any(dense[sum(dense) :])
        if "dense_layers" not in family.free or not is_leading:
            yield "dense"


# What is asked for, and what the nearest family has instead, where no field of it says so.
_WORDS: Final = {
    "window": ("a window of these layers (model.layer_pattern)", "has no such windows"),
    "rotary": ("layers that rotate nothing (model.layer_pattern)", "rotates in every layer"),
    "dense": ("these layers without experts", "has experts in every layer"),
    "n_kv_heads": ("heads that share keys and values", "has a key/value head per head"),
    "kv_lora_rank": ("attention that is not latent", "has model.kv_lora_rank above 0"),
    "experts": ("layers without experts", "has experts"),
}


def _refuse(source: ImportSource, family: Family, model: ForeignModel, misfit: str) -> None:
    """Mark the key that sets a feature as unsupported, since the nearest family lacks it."""
    value, is_needed = model.value(misfit), misfit in family.free
    if misfit in _WORDS and (is_needed or misfit not in FEATURES):
        feature, instead = _WORDS[misfit]
    elif misfit == "rope_scaling":
        feature = f"model.rope_scaling of kind {model.scaling}"
        instead = f"has {' and '.join(family.scalings)}"
    else:
        feature = f"model.{misfit} = {_toml(value)}"
        instead = f"has {_toml(family.fixed.get(misfit, FEATURES[misfit]))}"
    keys = model.keys.get(misfit, model.keys["norm"])
    key = next((key for key in keys if key in source.values), keys[0])
    reason = f"no family has {feature} with the rest of this model; nearest: {family.name}"
    default = "none" if value is None else value
    source.refuse(key, f"{reason}, which {instead}", default=default, is_final=is_needed)


def _toml(value: Any) -> str:
    return "none" if value is None else toml_value(value)
