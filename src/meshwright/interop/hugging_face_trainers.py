"""Imports configs of accelerate, transformers' Trainer with TRL, and axolotl, and writes plans.

Covers what their tables cannot express. All three train with FSDP2.

Source: transformers 5.23.0, training_args.py and distributed/configuration_utils.py; trl 1.16.0,
trainer/sft_config.py and trainer/model_config.py; accelerate 1.15.0, commands/config/cluster.py,
commands/config/config_args.py and commands/launch.py; axolotl 0.19.0, utils/schemas, and
utils/distributed.py for the degrees that are omitted.
"""

from __future__ import annotations

from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.interop.degrees import (
    LocalBatch,
    degree,
    fill_shards,
    imply_sharding,
    read_context,
    read_degrees,
    read_fsdp,
    read_local_batch,
    read_precision,
    read_recompute,
    read_without_masters,
)
from meshwright.interop.names import need_model, read_hub_name
from meshwright.interop.plan_source import PlanSource
from meshwright.interop.source import ImportSource

NATIVE: Final = "distributed_config."
ACCELERATE: Final = "parallelism_config."
_MODEL: Final = "model_name_or_path"


def read_trainer(source: ImportSource) -> None:
    """Import TrainingArguments and those of TRL, giving every key its verdict."""
    need_model(source, _MODEL)
    read_hub_name(source, _MODEL)
    _read_launcher(source)
    read_precision(source, {"bf16": "bf16", "fp16": "fp16"}, "fp32")
    _read_parallel(source)
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        read_recompute(source, key)
    read_local_batch(
        source, LocalBatch("per_device_train_batch_size", 8, "gradient_accumulation_steps")
    )
    read_rates(source)
    read_adapters(source, "lora_r", is_on=source.get("use_peft") is True)
    if source.get("use_peft") is True:
        source.translate("use_peft", {"lora.rank": source.target("lora.rank")})
    if source.get("packing") is True:
        source.honour("packing", note="rows are full")
    source.finish()


def _read_launcher(source: ImportSource) -> None:
    """Import the number of ranks in a command line of torchrun or accelerate."""
    nodes = source.whole("nnodes") or 1
    for key in ("nproc_per_node", "num_processes"):
        ranks = source.whole(key)
        if ranks is not None:
            total = ranks if key == "num_processes" else ranks * nodes
            if not source.setting.is_fixed:
                source.count_devices(total)
            source.translate(key, {"cluster.devices_per_node": total // nodes})
            source.translate("nnodes", {"cluster.nodes": nodes})


def _read_parallel(source: ImportSource) -> None:
    """Import DistributedConfig, or `fsdp` with accelerate's ParallelismConfig; otherwise DDP."""
    deepspeed = "deepspeed"
    if source.get(deepspeed) in (None, "", False):
        source.ignore(deepspeed, "off")
    if any(key.startswith(NATIVE) for key in source.values):
        _read_native(source)
        return
    degrees = {
        f"{ACCELERATE}dp_replicate_size": "layout.dp_replicate",
        f"{ACCELERATE}dp_shard_size": "layout.dp_shard",
        f"{ACCELERATE}tp_size": "layout.tp",
    }
    read_degrees(source, degrees)
    read_context(source, f"{ACCELERATE}cp_size", "ring")
    read_context(source, f"{ACCELERATE}sp_size", "ulysses")
    is_sharded = source.get("fsdp") not in (None, "", False, [])
    is_sharded |= any(key.startswith("fsdp_config.") for key in source.values) and (
        source.get("fsdp") is not False
    )
    if not is_sharded:
        source.honour("fsdp", note="off")
        fill_shards(source, "(ranks)", is_sharded=False)
        source.imply("layout.zero", 0, "without fsdp, ranks hold whole copies")
        return
    strategies = str(source.get("fsdp", "")).replace("[", " ").replace(",", " ").split()
    fill_shards(source, "fsdp")
    read_fsdp(source, "fsdp_config.")
    if "shard_grad_op" in strategies:
        source.imply("layout.zero", 2, "fsdp = shard_grad_op")
    if any("offload" in word for word in strategies):
        source.translate("fsdp", {"layout.zero": 3, "layout.offload": "params"})
    zero = source.target("layout.zero")
    source.translate("fsdp", {"layout.zero": 2 if "shard_grad_op" in strategies else zero})


def _read_native(source: ImportSource) -> None:
    """Import DistributedConfig: degrees default to 1, and tp does not shard experts."""
    degrees = {
        f"{NATIVE}tp_size": "layout.tp",
        f"{NATIVE}fsdp_size": "layout.dp_shard",
        f"{NATIVE}dp_replicate_size": "layout.dp_replicate",
        f"{NATIVE}pp_size": "layout.pp",
        f"{NATIVE}ep_size": "layout.ep",
    }
    read_degrees(source, degrees)
    for key, to in degrees.items():
        if source.target(to) is None:
            source.imply(to, 1, f"the default of {key}")
    imply_sharding(
        source, reshards=True, reason="DistributedConfig frees weights after the forward"
    )
    if degree(source, "layout.ep") > 1 and degree(source, "layout.tp") > 1:
        source.imply("layout.etp", 1, "experts are not cut by tp")
    key = f"{NATIVE}fsdp_cpu_offload"
    source.translate(key, {"layout.offload": "params"} if source.get(key) is True else {})


# transformers' names of AdamW by torchao and bitsandbytes, and axolotl's.
_ADAMW_IN_8_BITS: Final = (
    *("adamw_torch_8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "ao_adamw_8bit"),
)


def _refuse_other_forms(source: ImportSource, key: str) -> None:
    """Refuse optimizers that Meshwright has in another form than transformers or axolotl."""
    reason = ""
    if source.get(key) in ("lion_8bit", "paged_lion_8bit"):
        reason = "Lion's momentum is in fp32; nearest: lion_32bit"
    elif source.get(key) == "adamw_torch_4bit":
        reason = "no moments in 4 bits; nearest: adamw_torch_8bit"
    elif source.get(key) == "muon":  # axolotl's, of which the one for meshes is dion's
        reason = "no other iteration of Newton-Schulz; nearest: adamw_torch"
    if reason:
        source.refuse(key, reason, settled_by=["optimizer.name"])


def read_rates(source: ImportSource) -> None:
    """Import Adam's betas and bits, the steps, and the warm-up in steps or a share of the steps."""
    for key in ("optim", "optimizer"):
        if source.get(key) in _ADAMW_IN_8_BITS:
            to = {"optimizer.name": "adamw", "optimizer.state_dtype": "int8"}
            source.translate(key, to, "blocks of rows; all of matrices, and nothing is paged")
        _refuse_other_forms(source, key)
    betas = [source.number("adam_beta1", 0.9), source.number("adam_beta2", 0.999)]
    for key in ("adam_beta1", "adam_beta2"):
        source.translate(key, {"optimizer.betas": betas})
    if source.target("optimizer.betas") is None:
        source.fill("optimizer.betas", betas, "the trainer's default of adam_beta1, adam_beta2")
    if source.get("max_steps") in (-1, 0):
        source.ignore("max_steps", "num_train_epochs says it")
    elif (steps := source.whole("max_steps")) is not None:
        source.honour("max_steps", {"train.steps": steps})
    given = source.number("warmup_steps", 0.0)
    share = source.number("warmup_ratio", 0.0) or (given if 0 < given < 1 else 0.0)
    total = source.target("train.steps")
    warmup = round(share * int(total)) if share and total else int(given)
    for key in ("warmup_steps", "warmup_ratio"):
        if share and not total:
            source.miss(key, "a share of steps needs them; nearest: optimizer.warmup_steps")
        source.translate(key, {"optimizer.warmup_steps": warmup})
    if source.target("optimizer.warmup_steps") is None:
        source.fill("optimizer.warmup_steps", 0, "the trainer's default: no warm-up")


def read_adapters(source: ImportSource, rank: str, *, is_on: bool) -> None:
    """Import LoRA adapters; `rank` is the key of their rank.

    If they are off, the keys have no effect.
    """
    alpha = rank.replace("lora_rank", "lora_alpha").replace("lora_r", "lora_alpha")
    if not is_on:
        for key in (rank, alpha):
            source.ignore(key, "no adapters are trained")
        return
    size = source.whole(rank) or 16
    source.honour(rank, {"lora.rank": size})
    if rank not in source.values:
        source.imply("lora.rank", size, f"the trainer's default of {rank}")
    scale = source.number(alpha, 2.0 * size)
    source.honour(alpha, {"lora.alpha": scale})


PARALLEL: Final = "parallelism_config.parallelism_config_"
MEGATRON: Final = "megatron_lm_config.megatron_lm_"
FSDP: Final = "fsdp_config.fsdp_"
DEEPSPEED: Final = "deepspeed_config."


def read_accelerate(source: ImportSource) -> None:
    """Import accelerate's YAML, giving every key its verdict."""
    need_model(source, "(model)")
    _read_accelerate_launcher(source)
    kind = str(source.get("distributed_type", "NO"))
    readers = {"FSDP": _read_fsdp, "DEEPSPEED": _read_deepspeed, "MEGATRON_LM": _read_megatron}
    replicates = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU")
    if kind in readers:
        source.honour("distributed_type")
        readers[kind](source)
    elif kind in replicates:
        source.translate("distributed_type", {"layout.zero": 0})
        _read_axes(source)
        fill_shards(source, "num_processes", is_sharded=False)
    source.finish()


def _read_accelerate_launcher(source: ImportSource) -> None:
    """Import the number of ranks, or report that it contradicts the given number of devices."""
    ranks, nodes = source.whole("num_processes"), source.whole("num_machines")
    if ranks is None:
        return
    if not source.setting.is_fixed:
        source.count_devices(ranks)
    elif ranks != source.setting.devices:
        devices = source.setting.devices
        reason = (
            f"num_processes = {ranks}, but the cluster has {devices} devices; nearest: {devices}"
        )
        source.contradict(["num_processes"], reason, ["cluster.nodes", "cluster.devices_per_node"])
    source.translate("num_processes", {"cluster.devices_per_node": ranks // (nodes or 1)})
    source.translate("num_machines", {"cluster.nodes": nodes or 1})


def _read_axes(source: ImportSource) -> None:
    degrees = {
        f"{PARALLEL}dp_replicate_size": "layout.dp_replicate",
        f"{PARALLEL}dp_shard_size": "layout.dp_shard",
        f"{PARALLEL}tp_size": "layout.tp",
    }
    read_degrees(source, degrees)
    ring, heads = f"{PARALLEL}cp_size", f"{PARALLEL}sp_size"
    is_ring = (source.whole(ring) or 1) > 1
    read_context(source, ring if is_ring else heads, "ring" if is_ring else "ulysses")
    source.honour(heads if is_ring else ring, note="off")


def _read_fsdp(source: ImportSource) -> None:
    _read_axes(source)
    strategy = str(source.get(f"{FSDP}sharding_strategy", "")).upper()
    nodes = source.whole("num_machines") or 1
    if strategy.startswith("HYBRID") and f"{PARALLEL}dp_replicate_size" not in source.values:
        source.imply("layout.dp_replicate", nodes, f"{strategy} replicates over nodes")
    fill_shards(source, "num_processes")
    read_fsdp(source, FSDP)


def _read_deepspeed(source: ImportSource) -> None:
    _read_axes(source)
    stage = source.get(f"{DEEPSPEED}zero_stage", 2)
    source.take(f"{DEEPSPEED}zero_stage")
    if f"{DEEPSPEED}zero_stage" not in source.values:
        source.fill("layout.zero", 2, "accelerate's default of zero_stage")
    for state, to in (("param", "params"), ("optimizer", "optimizer")):
        key = f"{DEEPSPEED}offload_{state}_device"
        if source.get(key) == "cpu":
            best = "params" if source.target("layout.offload") == "params" else to
            source.translate(key, {"layout.offload": best})
        elif source.get(key) == "nvme":
            source.refuse(key, "no offload to disk; nearest: cpu", settled_by=["layout.offload"])
        else:
            source.honour(key, note="off")
    fill_shards(source, "num_processes", is_sharded=int(stage or 0) > 0)


def _read_megatron(source: ImportSource) -> None:
    degrees = {
        f"{MEGATRON}tp_degree": "layout.tp",
        f"{MEGATRON}pp_degree": "layout.pp",
        f"{MEGATRON}context_parallel_size": "layout.cp",
        f"{MEGATRON}expert_model_parallel_size": "layout.ep",
        f"{MEGATRON}expert_tensor_parallel_size": "layout.etp",
    }
    read_degrees(source, degrees)
    key = f"{MEGATRON}use_distributed_optimizer"
    source.translate(key, {"layout.zero": 1 if source.get(key) is True else 0})
    is_sharded = bool(source.target("layout.zero"))
    fill_shards(source, "num_processes", is_sharded=is_sharded)
    if degree(source, "layout.dp_shard") * degree(source, "layout.cp") == 1 and is_sharded:
        source.entries.pop(key, None)
        source.translate(key, {"layout.zero": 0}, "one data-parallel rank has nothing to shard")


DEGREES: Final = {
    "dp_replicate_size": "layout.dp_replicate",
    "dp_shard_size": "layout.dp_shard",
    "tensor_parallel_size": "layout.tp",
    "expert_parallel_size": "layout.ep",
}


def read_axolotl(source: ImportSource) -> None:
    """Import axolotl's YAML, giving every key its verdict."""
    need_model(source, "base_model")
    read_hub_name(source, "base_model")
    read_without_masters(source, "bfloat16", True)
    precisions = {"bf16": "bf16", "fp16": "fp16"}
    read_precision(source, precisions, "bf16" if "bf16" not in source.values else "fp32")
    if source.values.get("bf16") == "auto":
        source.translate("bf16", {"train.precision": "bf16"}, "where the device has it")
    _read_axolotl_parallel(source)
    if source.get("gradient_checkpointing") in ("offload", "offload_disk"):
        to = {"layout.recompute": "full", "layout.offload": "activations"}
        if source.get("gradient_checkpointing") == "offload":
            source.translate("gradient_checkpointing", to)
    read_recompute(source, "gradient_checkpointing")
    read_local_batch(source, LocalBatch("micro_batch_size", 1, "gradient_accumulation_steps"))
    read_rates(source)
    kind = source.get("adapter")
    read_adapters(source, "lora_r", is_on=kind == "lora")
    if kind == "lora":
        source.translate("adapter", {"lora.rank": source.target("lora.rank")})
    source.finish()


def _read_axolotl_parallel(source: ImportSource) -> None:
    """Import the parallel degrees; remaining ranks are FSDP shards, or replicas without FSDP."""
    read_degrees(source, DEGREES)
    key = "context_parallel_size"
    read_context(source, key if key in source.values else "sequence_parallel_degree", "ring")
    source.ignore("sequence_parallel_degree", f"{key} says it")
    if source.get("deepspeed") in (None, "", False):
        source.ignore("deepspeed", "off")
    is_sharded = bool(source.get("fsdp")) or any(
        k.startswith("fsdp_config.") for k in source.values
    )
    fill_shards(source, "dp_shard_size", is_sharded=is_sharded)
    if not is_sharded:
        source.honour("fsdp", note="off")
        source.imply("layout.zero", 0, "without fsdp_config, ranks hold whole copies")
        return
    if degree(source, "layout.ep") > 1 and degree(source, "layout.tp") > 1:
        source.imply("layout.etp", 1, "experts are not cut by tp")
    read_fsdp(source, "fsdp_config.")
    source.translate("fsdp", {"layout.zero": source.target("layout.zero")})
    if "fsdp_config.reshard_after_forward" not in source.values:
        imply_sharding(source, reshards=True, reason="the default of reshard_after_forward")


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
    """Return a plan as keys of accelerate's YAML, such as `fsdp_config.fsdp_version`."""
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
    """Return a plan as TrainingArguments, with DistributedConfig as `distributed_config.*`."""
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
    """Return a plan as keys of axolotl's YAML, such as `micro_batch_size`."""
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
    if optimizer.state_dtype == "int8":
        keys[name] = _ADAMW_IN_8_BITS[0]
    elif optimizer.state_dtype != "fp32":
        rule = f"this config cannot say optimizer.state_dtype = {optimizer.state_dtype}"
        raise ConfigError(f"{rule}; nearest: fp32, int8")
    if source.is_stated("optimizer.schedule"):
        if optimizer.schedule not in _SCHEDULES:
            raise ConfigError(
                f"optimizer.schedule = {optimizer.schedule!r} is not in this config; nearest: "
                f"{', '.join(sorted(_SCHEDULES))}"
            )
        keys[schedule] = optimizer.schedule
    return keys
