"""`adapter_config.json`: low-rank adapters in PEFT's format, without torch.

Supports the PEFT settings that say which layers have adapters and how these are scaled. Settings
for another kind of adapter, such as DoRA's magnitudes, are refused by key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from meshwright.errors import CheckpointError, ConfigError, refusal
from meshwright.spec.lora import ALL_LINEAR, Lora, adapted, target_names
from meshwright.spec.stored import read_object

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
# Settings under whose other values an adapter computes something else than ours.
_FIXED: Final[Mapping[str, tuple[object, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "layers_to_transform": ([],),
    "layers_pattern": ([],),
    "layer_replication": ([],),
    "exclude_modules": ([], ""),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
}


def adapter_config(
    lora: Lora, family: str, *, gated: bool, base: str | None, experts: int = 0
) -> dict[str, Any]:
    """Return the `adapter_config.json` of adapters on a model of a family, stored at `base`."""
    names = target_names(family, gated=gated, experts=experts)
    targets = adapted(lora, family, gated=gated, experts=experts)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": sorted({names[one] for one in targets}),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the keys of `[lora]` that a PEFT folder sets.

    Raises `CheckpointError` for another folder, `ConfigError` for what is not supported.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a folder of PEFT's: {path} is missing")
    content = read_object(path)
    for key, legal in _FIXED.items():
        value = content.get(key)
        if value is not None and value not in legal:
            told = str(value)[:60]
            rule = f"{path}: {key} = {told} is not supported"
            raise ConfigError(refusal(rule, legal=[repr(legal[0])]))
    rank, alpha = content.get("r"), content.get("lora_alpha")
    dropout, rslora = content.get("lora_dropout", 0.0), content.get("use_rslora", False)
    for key, given, kind in (
        ("r", rank, int),
        ("lora_alpha", alpha, (int, float)),
        ("lora_dropout", dropout, (int, float)),
    ):
        if not isinstance(given, kind) or isinstance(given, bool):
            raise ConfigError(f"{path}: {key} = {str(given)[:60]} is no number")
    if not isinstance(rslora, bool):
        raise ConfigError(f"{path}: use_rslora = {str(rslora)[:60]} is neither true nor false")
    return {
        "rank": rank,
        "alpha": float(str(alpha)),
        "targets": _targets(path, content.get("target_modules")),
        "rslora": rslora,
        "dropout": float(str(dropout)),
    }


def _targets(path: Path, found: object) -> tuple[str, ...]:
    """Return the layers that adapters are on, by the last part of their names."""
    if found == ALL_LINEAR:
        return (ALL_LINEAR,)
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        told = f"{path}: target_modules = {str(found)[:60]} is not a list of layers' names"
        raise ConfigError(refusal(told, legal=['["q_proj", "v_proj"]']))
    return tuple(sorted(found))
