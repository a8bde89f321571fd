"""A plan for accelerate, for transformers' Trainer, and for axolotl, which stand on FSDP2.

Source: accelerate 1.15.0, commands/config/config_args.py; transformers 5.23.0, training_args.py
and distributed/configuration_utils.py; axolotl 0.19.0, utils/schemas.
"""

from __future__ import annotations

from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.interop.accelerate import FSDP, PARALLEL
from meshwright.interop.export.source import PlanSource
from meshwright.interop.training_arguments import NATIVE

_GIVEN: Final = {
    "train.steps": "max_steps",
    "train.clip_norm": "max_grad_norm",
    "train.seed": "seed",
    "optimizer.lr": "learning_rate",
    "optimizer.eps": "adam_epsilon",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.warmup_steps": "warmup_steps",
}
_SCHEDULES: Final = {"linear", "cosine", "constant"}


def accelerate_keys(source: PlanSource) -> dict[str, Any]:
    """Return the keys of accelerate's YAML, such as `fsdp_config.fsdp_version`."""
    layout, train = source.layout, source.config.train
    is_sharded = layout.zero > 0
    replicas = "NO" if source.devices == 1 else "MULTI_GPU"
    keys: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_sharded else replicas,
        "mixed_precision": "no" if train.precision == "fp32" else train.precision,
        "num_machines": source.nodes,
        "num_processes": source.devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
    }
    if train.compile is True:
        keys["dynamo_config.dynamo_backend"] = "INDUCTOR"
    if not is_sharded:
        return keys
    return keys | {
        f"{FSDP}version": 2,
        f"{FSDP}reshard_after_forward": layout.zero == 3,
        f"{FSDP}offload_params": layout.offload == "params",
        f"{FSDP}activation_checkpointing": layout.recompute == "full",
        f"{FSDP}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        f"{FSDP}state_dict_type": "SHARDED_STATE_DICT",
        f"{PARALLEL}dp_replicate_size": layout.dp_replicate,
        f"{PARALLEL}dp_shard_size": layout.dp_shard,
        f"{PARALLEL}tp_size": layout.tp,
        f"{PARALLEL}cp_size": layout.cp,
    }


def transformers_keys(source: PlanSource) -> dict[str, Any]:
    """Return TrainingArguments, and those of DistributedConfig as `distributed_config.*`."""
    layout, train = source.layout, source.config.train
    keys: dict[str, Any] = {
        "output_dir": "output",
        "per_device_train_batch_size": layout.microbatch,
        "gradient_accumulation_steps": source.accumulation,
        "gradient_checkpointing": layout.recompute == "full",
        **_precision(source),
    }
    if train.compile is True:
        keys["torch_compile"] = True
    if layout.zero or layout.tp > 1:
        keys |= {
            f"{NATIVE}tp_size": layout.tp,
            f"{NATIVE}fsdp_size": layout.dp_shard,
            f"{NATIVE}dp_replicate_size": layout.dp_replicate,
        }
        if layout.zero:
            keys[f"{NATIVE}fsdp_cpu_offload"] = layout.offload == "params"
            keys[f"{NATIVE}fsdp_mixed_precision"] = train.precision != "fp32"
    return keys | _optimizer(source, "lr_scheduler_type", "optim")


def axolotl_keys(source: PlanSource) -> dict[str, Any]:
    """Return the keys of axolotl's YAML, such as `micro_batch_size`."""
    layout, train = source.layout, source.config.train
    source.check_named_model()
    keys: dict[str, Any] = {
        "base_model": source.hub_name(),
        "sequence_len": train.seq_len,
        "micro_batch_size": layout.microbatch,
        "gradient_accumulation_steps": source.accumulation,
        "gradient_checkpointing": layout.recompute == "full",
        **_precision(source),
    }
    if train.compile is True:
        keys["torch_compile"] = True
    if layout.zero:
        keys |= {
            "dp_replicate_size": layout.dp_replicate,
            "dp_shard_size": layout.dp_shard,
            "tensor_parallel_size": layout.tp,
            "context_parallel_size": layout.cp,
            "fsdp_version": 2,
            "fsdp_config.reshard_after_forward": layout.zero == 3,
            "fsdp_config.offload_params": layout.offload == "params",
            "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_config.state_dict_type": "SHARDED_STATE_DICT",
        }
    if source.is_stated("optimizer.min_lr_ratio"):
        keys["cosine_min_lr_ratio"] = source.config.optimizer.min_lr_ratio
    return keys | _optimizer(source, "lr_scheduler", "optimizer")


def _precision(source: PlanSource) -> dict[str, bool]:
    precision = source.config.train.precision
    return {name: precision == name for name in ("bf16", "fp16")}


def _optimizer(source: PlanSource, schedule: str, name: str) -> dict[str, Any]:
    optimizer, keys = source.config.optimizer, source.given(_GIVEN)
    if source.is_stated("optimizer.betas"):
        keys["adam_beta1"], keys["adam_beta2"] = optimizer.betas
    if source.is_stated("optimizer.name"):
        keys[name] = source.optimizer_name("hf")
    if source.is_stated("optimizer.schedule"):
        if optimizer.schedule not in _SCHEDULES:
            raise ConfigError(
                f"optimizer.schedule = {optimizer.schedule!r} is not in this config; nearest: "
                f"{', '.join(sorted(_SCHEDULES))}"
            )
        keys[schedule] = optimizer.schedule
    return keys
