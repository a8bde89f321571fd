"""`adapter_config.json`: low-rank adapters in PEFT's format, without torch.

Supports the PEFT settings that say which layers have adapters and how these are scaled. Settings
for another kind of adapter, such as DoRA's magnitudes, are refused by key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from meshwright.errors import CheckpointError, ConfigError, refusal
from meshwright.spec.families import FAMILIES
from meshwright.spec.hub import hub_id
from meshwright.spec.lora import (
    ALL_LINEAR,
    DOWN,
    JOINED,
    JOINT,
    BlockKinds,
    Lora,
    adapted,
    target_names,
)
from meshwright.spec.stored import ADAPTER_CONFIG, read_object

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
    # "pissa", "olora" and others also change the weights that adapters are added to.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica"),
    "alora_invocation_tokens": ([],),
    "arrow_config": ({},),
    "use_bdlora": (False, {}),
}
_LAYER: Final = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_NUMBER: Final = re.compile(r"(^|\.)experts\.\d+\.")


def adapter_config(lora: Lora, blocks: BlockKinds, *, base: str | None) -> dict[str, Any]:
    """Return the `adapter_config.json` of adapters on a model with such blocks, stored at `base`.

    Experts whose gate and up have one adapter are parameters of one module, as in transformers 5.
    """
    layers = adapted(lora, blocks)
    parameters = in_one_module(layers, blocks)
    names = target_names(blocks)
    modules = {layer: names[layer][0] for layer in layers if layer not in parameters}
    identifier, revision = None if base is None else hub_id(base), "main"
    if identifier is not None:
        base, revision = identifier
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **({} if revision == "main" else {"revision": revision}),
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": sorted(_modules(modules, names, blocks.experts)),
        **({"target_parameters": [names[layer][-1] for layer in parameters]} if parameters else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def in_one_module(layers: Collection[str], blocks: BlockKinds) -> tuple[str, ...]:
    """Return the adapted layers that PEFT wraps as parameters of one module, in order.

    Wrappers of a module lie in each other, the first one innermost.
    """
    if JOINT in layers or FAMILIES[blocks.family].fused_experts:
        return tuple(layer for layer in (JOINT, DOWN) if layer in layers)
    return ()


def _modules(
    modules: Mapping[str, str], names: Mapping[str, tuple[str, ...]], experts: int
) -> Iterator[str]:
    """Yield the names of modules: the last part where all layers that end so have an adapter."""
    for ours, name in modules.items():
        last = name.rsplit(".", 1)[-1]
        alike = [layer for layer, stored in names.items() if stored[0].rsplit(".", 1)[-1] == last]
        if set(alike) <= modules.keys():
            yield last
        elif ours in (*JOINED, DOWN):
            yield from (f"experts.{expert}.{last}" for expert in range(experts))
        else:
            yield ".".join(name.split(".")[-2:])


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
            text = str(value)[:60]
            rule = f"{path}: {key} = {text} is not supported"
            raise ConfigError(refusal(rule, legal=[repr(legal[0])]))
    rank, alpha = content.get("r"), content.get("lora_alpha")
    dropout, rslora = content.get("lora_dropout", 0.0), content.get("use_rslora", False)
    for key, number, kind in (
        ("r", rank, int),
        ("lora_alpha", alpha, (int, float)),
        ("lora_dropout", dropout, (int, float)),
    ):
        if not isinstance(number, kind) or isinstance(number, bool) or not math.isfinite(number):
            raise ConfigError(f"{path}: {key} = {str(number)[:60]} is not a number")
    if int(str(rank)) < 1:
        raise ConfigError(refusal(f"{path}: r = {rank} has no adapters", legal=["r = 1"]))
    if not isinstance(rslora, bool):
        raise ConfigError(f"{path}: use_rslora = {str(rslora)[:60]} is neither true nor false")
    return {
        "rank": rank,
        "alpha": float(str(alpha)),
        "targets": _targets(path, content),
        "rslora": rslora,
        "dropout": float(str(dropout)),
    }


def _targets(path: Path, content: Mapping[str, object]) -> tuple[str, ...]:
    """Return the layers that adapters are on, by the last parts of their names.

    Each expert by itself is all experts; parameters without a module are experts'.
    """
    parameters = _names(path, "target_parameters", content.get("target_parameters") or [])
    target_modules = content.get("target_modules")
    if target_modules == ALL_LINEAR:
        modules = {ALL_LINEAR}
    else:
        modules = _names(path, "target_modules", target_modules or ([] if parameters else None))
    modules = {_NUMBER.sub(r"\1experts.", module) for module in _of_all_layers(modules)}
    parameters = {
        parameter if "." in parameter else f"mlp.experts.{parameter}" for parameter in parameters
    }
    return tuple(sorted(modules | parameters))


def _of_all_layers(modules: set[str]) -> set[str]:
    """Return names without their layer's number where each name is in all layers.

    PEFT writes the numbers of few layers. Whether a model has more is seen from the tensors.
    """
    layers_of: dict[str, set[int]] = {}
    for module in modules:
        if (part := _LAYER.fullmatch(module)) is None:
            return modules
        layers_of.setdefault(part[2], set()).add(int(part[1]))
    layers = set().union(*layers_of.values())
    is_whole = layers == set(range(len(layers))) and all(
        numbers == layers for numbers in layers_of.values()
    )
    return set(layers_of) if is_whole else modules


def _names(path: Path, key: str, names: object) -> set[str]:
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return set(names)
    rule = f"{path}: {key} = {str(names)[:60]} is not a list of names"
    raise ConfigError(refusal(rule, legal=['["q_proj", "v_proj"]']))
