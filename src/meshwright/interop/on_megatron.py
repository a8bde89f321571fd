"""Imports configs of NeMo (Megatron-Bridge) and ms-swift, which train with Megatron-Core.

Their keys are Megatron-LM's arguments under other spellings; a table has each system's other keys.
Source: megatron-bridge 0.3.1, training/config.py; NeMo 1's megatron_gpt_config.yaml; ms-swift
4.6.0, swift/megatron/arguments/megatron_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.interop.degrees import (
    LocalBatch,
    fill_shards,
    read_context,
    read_local_batch,
    read_recompute,
)
from meshwright.interop.hugging_face_trainers import read_adapters, read_rates, read_trainer
from meshwright.interop.megatron import read_megatron
from meshwright.interop.names import model_names, need_model, read_hub_name
from meshwright.interop.source import ImportSource

# Sections of Megatron-Bridge's config whose keys are Megatron-LM's arguments.
SECTIONS: Final = ("model", "train", "optimizer", "scheduler", "ddp", "dist")
# Arguments under another name than Megatron-LM's, without their section.
_NAMES: Final = {
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "num-moe-experts": "num-experts",
    "layernorm-epsilon": "norm-epsilon",
    "gated-linear-unit": "swiglu",
    "encoder-seq-length": "seq-length",
    "sequence-length": "seq-length",
    "activations-checkpoint-granularity": "recompute-granularity",
    "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers",
    "sequence-parallelism": "sequence-parallel",
}
_LAUNCHED: Final = {"trainer.devices": "nproc-per-node", "trainer.num_nodes": "nnodes"}
_PRECISIONS: Final = {
    "bf16_mixed": "bf16",
    "bf16-mixed": "bf16",
    "fp16_mixed": "fp16",
    "fp16-mixed": "fp16",
    "bf16": "bf16",
    "bf16-true": "bf16",
    "16": "fp16",
    "32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "bf16_with_fp8_current_scaling_mixed": "bf16",
}
# Of a file in which one of these keys is there, Megatron-SWIFT's is the trainer.
MEGATRON_KEYS: Final = frozenset(
    {
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size"),
        *("expert_model_parallel_size", "context_parallel_size", "global_batch_size"),
        *("recompute_granularity", "train_iters"),
    }
)


def spelled_as_megatron(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return the Megatron-LM argument that each key of Megatron-Bridge or NeMo 1 corresponds to.

    Keys without one are left out.
    """
    names: dict[str, str] = {}
    for key in keys:
        section, _, name = key.partition(".")
        if key in _LAUNCHED:
            names[key] = _LAUNCHED[key]
        elif key in ("dataset.sequence_length", "dataset.seq_length"):
            names[key] = "seq-length" if "model.seq_length" not in keys else key
        elif key == "rng.seed":
            names[key] = "seed"
        elif section in SECTIONS and name and "." not in name:
            dashed = name.replace("_", "-")
            names[key] = _NAMES.get(dashed, dashed)
    return names


def spelled_as_swift(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return the Megatron-LM argument for each key of Megatron-SWIFT.

    For ms-swift on transformers, keys only get underscores.
    """
    if not MEGATRON_KEYS & {key.replace("-", "_") for key in keys}:
        return {key: key.replace("-", "_") for key in keys}
    dashed = {key: key.replace("_", "-") for key in keys}
    return {key: _NAMES.get(name, name) for key, name in dashed.items()}


def read_nemo(source: ImportSource) -> None:
    """Import Megatron-Bridge's overrides or NeMo 1's YAML, giving every key its verdict."""
    recipe = str(source.get("recipe", ""))
    for preset, names in model_names().items():
        if names.bridge and recipe.startswith(f"{names.bridge}_"):
            source.translate("recipe", {"model.preset": preset})
    if "num-layers" not in source.values:
        need_model(source, "recipe")
    for key in ("mixed_precision", "trainer.precision"):
        _read_precision(source, key)
    _read_virtual_stages(source)
    if source.target("layout.zero") is None and "use-distributed-optimizer" not in source.values:
        source.fill("layout.zero", 1, "recipes have use_distributed_optimizer = true")
    read_megatron(source)


def _read_precision(source: ImportSource, key: str) -> None:
    precision = _PRECISIONS.get(str(source.get(key)))
    if precision is None:
        return
    fp8 = {"train.fp8": True} if "fp8" in str(source.get(key)) else {}
    source.translate(key, {"train.precision": precision, **fp8})


def _read_virtual_stages(source: ImportSource) -> None:
    """Ignore a number of virtual stages that is null, which means none."""
    key = "num-virtual-stages-per-pipeline-rank"
    if source.values.get(key, 0) is None:
        source.ignore(key, "not set")


def read_swift(source: ImportSource) -> None:
    """Import a config of ms-swift, on Megatron or on transformers, giving every key its verdict."""
    need_model(source, "model")
    read_hub_name(source, "model")
    is_megatron = any(key.replace("-", "_") in MEGATRON_KEYS for key in source.values)
    other = "transformers" if is_megatron else "Megatron"
    source.tables = [table for table in source.tables if table.name != other]
    for key in ("torch_dtype", "torch-dtype"):
        _read_precision(source, key)
    _read_tuner(source, "lora-rank" if is_megatron else "lora_rank")
    if is_megatron:
        if source.target("train.precision") is None:
            source.fill("train.precision", "bf16", "the dtype of the stored weights")
        _read_virtual_stages(source)
        if source.get("recompute-granularity") == "none":
            source.honour("recompute-granularity", {"layout.recompute": "none"})
        elif "recompute-granularity" not in source.values:
            source.fill("layout.recompute", "selective", "ms-swift's default")
        if "use-distributed-optimizer" not in source.values:
            source.fill("layout.zero", 1, "ms-swift's default of use_distributed_optimizer")
        read_megatron(source)
        return
    if source.get("sequence_parallel_size") is not None:
        read_context(source, "sequence_parallel_size", "ulysses")
    _read_swift_deepspeed(source)
    if "gradient_checkpointing" not in source.values:
        source.fill("layout.recompute", "full", "ms-swift's default of gradient_checkpointing")
    if source.target("layout.zero") is None:
        read_trainer(source)
        return
    read_recompute(source, "gradient_checkpointing")
    fill_shards(source, "deepspeed", is_sharded=source.target("layout.zero") != 0)
    names = LocalBatch("per_device_train_batch_size", 1, "gradient_accumulation_steps")
    read_local_batch(source, names)
    read_rates(source)
    source.finish()


def _read_tuner(source: ImportSource, rank: str) -> None:
    keys = ("train_type", "tuner_type", "train-type", "tuner-type")
    kind = next((source.get(key) for key in keys if source.get(key) is not None), "full")
    read_adapters(source, rank, is_on=kind == "lora")
    for key in keys:
        if kind == "lora":
            source.translate(key, {"lora.rank": source.target("lora.rank")})


def _read_swift_deepspeed(source: ImportSource) -> None:
    """Import the name of one of ms-swift's DeepSpeed configs, zero0 to zero3 or with `_offload`."""
    name = str(source.get("deepspeed", ""))
    size = source.whole("deepspeed_autotp_size")
    if size is not None:
        source.honour("deepspeed_autotp_size", {"layout.tp": size})
    stage, _, offload = name.partition("_")
    if stage in ("zero0", "zero1", "zero2", "zero3") and offload in ("", "offload"):
        zero = int(stage[-1])
        moved = {"layout.offload": "params" if zero == 3 else "optimizer"} if offload else {}
        source.translate("deepspeed", {"layout.zero": zero, **moved})
