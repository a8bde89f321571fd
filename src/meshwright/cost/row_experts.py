"""Reads the experts and the latent attention of a row of published measurements as model fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_LATENT: Final = (
    *("q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)


class RowError(Exception):
    """A row that cannot be priced; the message says why."""


def mixture(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model fields of a row's experts; raises `RowError` if no model family has such
    experts."""
    shared, width = int(row.get("shared_ffn") or 0), row.get("moe_ffn") or row.get("ffn")
    if not row.get("topk") or not width:
        raise RowError("the row has experts, but lacks topk or moe_ffn")
    fields = {
        "family": "qwen2_moe" if shared else "qwen3_moe",
        "experts": row["experts"],
        "top_k": row["topk"],
        "expert_ffn_dim": width,
    }
    if shared:
        fields["shared_ffn_dim"] = shared
    dense, has_experts = _dense_layers(row) if row.get("moe_layer_freq") else (0, [])
    if not row.get("kv_lora_rank"):
        pattern = [{} if has else {"dense": True} for has in has_experts]
        return {**fields, "layer_pattern": pattern} if has_experts else fields
    if not all(has_experts[dense:]):
        raise RowError("with latent attention only the first layers are dense")
    return {**fields, **_latent(row), "shared_ffn_dim": shared, "dense_layers": dense}


def _latent(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model fields of latent attention."""
    sizes = {key: int(row.get(key) or 0) for key in _LATENT}
    if missing := [key for key in _LATENT if not sizes[key] and key != "q_lora_rank"]:
        raise RowError(f"the row has latent attention, but lacks {' and '.join(missing)}")
    fixed = {"family": "deepseek_v3", "expert_groups": 1, "top_groups": 1}
    return {**fixed, "head_dim": sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"], **sizes}


def _dense_layers(row: Mapping[str, Any]) -> tuple[int, list[bool]]:
    """Return how many leading layers have no experts, and for each layer whether it has some."""
    text, layers = str(row["moe_layer_freq"]), row["layers"]
    parts = re.fullmatch(r"\(?\[([01])\]\*(\d+)\+\[([01])\]\*(\d+)\)?", text)
    if parts is None:
        raise RowError(f"moe_layer_freq {text!r}: only ([0]*n+[1]*m) is read")
    first, count, second, remaining = map(int, parts.groups())
    kinds = [bool(first)] * count + [bool(second)] * remaining
    if len(kinds) != layers:
        raise RowError(f"moe_layer_freq has {len(kinds)} layers, the row {layers}")
    return next((index for index, has in enumerate(kinds) if has), layers), kinds
