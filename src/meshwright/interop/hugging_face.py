"""Imports Hugging Face's config.json, and reports what each key means for the model."""

from __future__ import annotations

from typing import Any

from meshwright.errors import ConfigError
from meshwright.interop.source import ImportSource
from meshwright.interop.table import KeyRow
from meshwright.spec.families import FAMILIES
from meshwright.spec.hf import FULL, SLIDING, spec_from_hf
from meshwright.spec.model import OF_PADDING

# Where each key lands; what has no own place is a condition that the model meets.
_TARGETS = {
    "model_type": "family",
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "context",
    "hidden_act": "activation",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
    "rope_theta": "rope_theta",
    "partial_rotary_factor": "rotary_pct",
    "rotary_pct": "rotary_pct",
    "rotary_dim": "rotary_pct",
    "rotary_emb_base": "rope_theta",
    "hidden_activation": "activation",
    "sliding_window": "layer_pattern",
    "layer_types": "layer_pattern",
    "sliding_window_pattern": "layer_pattern",
    "rope_local_base_freq": "layer_pattern",
    "no_rope_layers": "layer_pattern",
    "no_rope_layer_interval": "layer_pattern",
    **{key.hf_key: key.ours for family in FAMILIES.values() for key in family.keys},
}
# Tables of rotary settings, and where each of their keys lands. A table inside one is of a kind of
# layer, of which those with a window have their settings in the pattern.
_ROTARY = ("rope_scaling", "rope_parameters")
_IN_ROTARY = {"rope_theta": "rope_theta", "partial_rotary_factor": "rotary_pct"}
_BY_RULE = KeyRow(by_rule=True)
# Keys that a model cannot do without.
_NEEDED = ("model_type", "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads")


def read_hugging_face(source: ImportSource) -> None:
    """Import a config.json, giving every key its verdict.

    If `spec_from_hf` refuses it, the key that its message names first is unsupported, and the
    verdicts of the others are those for the model without this key.
    """
    config = dict(source.values)
    fields = _fields(source, config)
    if not fields:
        for key in config:
            if source.tables[0].find(key) == _BY_RULE:
                source.miss(key, "the model is refused")
    for key, field in _TARGETS.items():
        if field not in fields:
            continue
        value = fields[field]
        if isinstance(value, dict) or value != config.get(key):
            source.translate(key, {f"model.{field}": value})
        else:
            source.honour(key, {f"model.{field}": value})
    for key in _ROTARY if fields else ():
        _take_rotary(source, key, fields)
    for key, row in source.tables[0].rows.items():
        if row == _BY_RULE and fields:
            source.honour(key, note="as it must be")
    for field, value in fields.items():
        if value is not None and source.target(f"model.{field}") is None:
            source.fill(f"model.{field}", value, "transformers' default")
    source.finish()


def _take_rotary(source: ImportSource, key: str, fields: dict[str, Any]) -> None:
    """Import a key with a table of rotary settings, and all model fields that it sets."""
    table = source.get(key)
    if not isinstance(table, dict):
        if fields.get("rope_scaling") is None:
            source.honour(key, {"model.rope_scaling": None})
        return
    stated = ["rope_scaling"]
    tables = {FULL: table, **table}  # settings outside these tables apply to all layers
    for kind, settings in tables.items():
        if kind == SLIDING and isinstance(settings, dict):
            stated.append("layer_pattern")
        elif isinstance(settings, dict):
            stated += [
                field for name, field in _IN_ROTARY.items() if settings.get(name) is not None
            ]
    source.translate(key, {f"model.{field}": fields[field] for field in stated if field in fields})


def _fields(source: ImportSource, config: dict[str, Any]) -> dict[str, Any]:
    """Return the model fields of a config without the keys that are unsupported; empty if none.

    Marks these keys as unsupported.
    """
    while True:
        try:
            spec = spec_from_hf(config)
            family = FAMILIES[spec.family]
            implied = {*family.features, *family.derived}  # need not be said
            return spec.model_dump(exclude={"preset", "init_from", OF_PADDING, *implied})
        except ConfigError as error:
            named = next((key for key in config if str(error).startswith(f"{key} ")), None)
            is_final = named is None or named in _NEEDED
            key = "model_type" if named is None else named
            source.refuse(key, str(error), default="none", is_final=is_final)
            if is_final:
                return {}
            del config[key]
