"""Sizes of well-known models, from `row_models.toml`, for rows of measurements that leave them
out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from meshwright.parsing import parse_toml
from meshwright.spec.model import ModelSpec
from meshwright.spec.resolve import model_spec

Row = Mapping[str, Any]
_OF_SIZE = ("layers", "hidden", "heads")


def known(row: Row, assumed: list[str]) -> Row:
    """Return the row with its missing sizes filled in from the model's name; notes these in
    `assumed`."""
    entry = _found(row)
    if entry is None:
        return row
    preset = _preset(entry)
    sizes = dict(entry.get("sizes", {}))
    if preset is not None:
        sizes["vocab"] = preset.vocab_size
        if not any(row.get(key) for key in _OF_SIZE):
            sizes |= _sizes(preset)
    added = {key: value for key, value in sizes.items() if row.get(key) is None}
    if added:
        assumed.append(", ".join(f"{key} {value}" for key, value in added.items()))
    return {**row, **added}


def whole(row: Row) -> ModelSpec | None:
    """Return the preset of the model that a row names, if the row states no sizes; otherwise
    None."""
    entry = None if any(row.get(key) for key in _OF_SIZE) else _found(row)
    return None if entry is None else _preset(entry)


def _found(row: Row) -> Mapping[str, Any] | None:
    name = str(row.get("model", ""))
    return next(
        (entry for entry in _table() if re.search(entry["named"], name, re.IGNORECASE)), None
    )


def _preset(entry: Mapping[str, Any]) -> ModelSpec | None:
    return model_spec(preset=entry["preset"]) if "preset" in entry else None


def _sizes(model: ModelSpec) -> dict[str, Any]:
    return {
        "layers": model.n_layers,
        "hidden": model.dim,
        "heads": model.n_heads,
        "kv_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "ffn": model.ffn_dim,
        "experts": model.experts,
        "topk": model.top_k,
        "moe_ffn": model.expert_width,
    }


@cache
def _table() -> list[dict[str, Any]]:
    text = resources.files("meshwright.cost").joinpath("row_models.toml").read_text("utf-8")
    entries: list[dict[str, Any]] = parse_toml(text)["model"]
    return entries
