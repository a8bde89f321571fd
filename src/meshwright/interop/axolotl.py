"""axolotl's YAML: what the table `axolotl.toml` cannot say row by row.

Source: axolotl 0.19.0, utils/schemas, and utils/distributed.py for the degrees that are left out.
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
from meshwright.interop.training_arguments import read_adapters, read_rates

DEGREES: Final = {
    "dp_replicate_size": "layout.dp_replicate",
    "dp_shard_size": "layout.dp_shard",
    "tensor_parallel_size": "layout.tp",
    "expert_parallel_size": "layout.ep",
}


def read_axolotl(source: ImportSource) -> None:
    """Give every key of axolotl's YAML its verdict."""
    need_model(source, "base_model")
    read_hub_name(source, "base_model")
    precisions = {"bf16": "bf16", "fp16": "fp16"}
    read_precision(source, precisions, "bf16" if "bf16" not in source.values else "fp32")
    if source.values.get("bf16") == "auto":
        source.translate("bf16", {"train.precision": "bf16"}, "where the device has it")
    _read_parallel(source)
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


def _read_parallel(source: ImportSource) -> None:
    """Take the degrees: with FSDP, what they leave is sharded, else replicated."""
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
