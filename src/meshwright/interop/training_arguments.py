"""transformers' TrainingArguments and TRL's configs: what `transformers.toml` cannot say by row.

Source: transformers 5.23.0, training_args.py and distributed/configuration_utils.py; trl 1.16.0,
trainer/sft_config.py and trainer/model_config.py.
"""

from __future__ import annotations

from typing import Final

from meshwright.interop.degrees import (
    LocalBatch,
    degree,
    fill_shards,
    imply_sharding,
    read_degrees,
    read_local_batch,
    read_precision,
)
from meshwright.interop.fsdp import read_context, read_fsdp, read_recompute
from meshwright.interop.names import need_model, read_hub_name
from meshwright.interop.source import ImportSource

NATIVE: Final = "distributed_config."
ACCELERATE: Final = "parallelism_config."
_MODEL: Final = "model_name_or_path"


def read_trainer(source: ImportSource) -> None:
    """Give every key of TrainingArguments, and of TRL's, its verdict."""
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
    """Take the ranks that torchrun or accelerate start, of a command line."""
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
    """Take DistributedConfig, or accelerate's ParallelismConfig with `fsdp`; else ranks are DDP."""
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
    """Take DistributedConfig: what it leaves out is 1, and experts are not cut by tp."""
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


def read_rates(source: ImportSource) -> None:
    """Take Adam's decay rates, the steps, and the warm-up in steps or as a share of them."""
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
    """Take low-rank adapters beside frozen weights."""
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
