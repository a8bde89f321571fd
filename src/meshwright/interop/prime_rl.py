"""Imports prime-rl's TOML of a supervised run, for what the table `prime_rl.toml` cannot express.

Source: PrimeIntellect-ai/prime-rl of August 2026, packages/prime-rl-configs: trainer.py and sft.py.
"""

from __future__ import annotations

from meshwright.interop.degrees import (
    LocalBatch,
    fill_shards,
    imply_sharding,
    read_degrees,
    read_local_batch,
    read_without_masters,
)
from meshwright.interop.names import need_model, read_hub_name
from meshwright.interop.source import ImportSource

_BATCH = 128


def read_prime_rl(source: ImportSource) -> None:
    """Import prime-rl's TOML, giving every key its verdict."""
    need_model(source, "model.name")
    read_hub_name(source, "model.name")
    _read_devices(source)
    if source.values.get("model.ep") == "auto":
        source.ignore("model.ep", "chosen by the model")
    degrees = {
        "model.dp_replicate": "layout.dp_replicate",
        "model.tp": "layout.tp",
        "model.cp": "layout.cp",
        "model.ep": "layout.ep",
    }
    read_degrees(source, degrees)
    fill_shards(source, "model.dp_replicate")
    key = "model.reshard_after_forward"
    imply_sharding(source, reshards=source.get(key, True) is True, reason=f"{key}, by default true")
    source.translate(key, {"layout.zero": source.target("layout.zero")})
    source.fill("train.precision", "bf16", "prime-rl computes in bf16 with fp32 weights")
    read_without_masters(source, "model.optimization_dtype", "bfloat16")
    _read_memory(source)
    _read_lengths(source)
    read_local_batch(source, LocalBatch("data.micro_batch_size", 1, total="data.batch_size"))
    if "data.batch_size" not in source.values:
        source.fill("train.batch", _BATCH, "prime-rl's default of data.batch_size")
    if (rank := source.whole("model.lora.rank")) is not None:
        source.honour("model.lora.rank", {"lora.rank": rank})
    source.finish()


def _read_devices(source: ImportSource) -> None:
    nodes, gpus = "deployment.num_train_nodes", "deployment.num_train_gpus"
    count, ranks = source.whole(nodes) or 1, source.whole(gpus)
    if ranks is None and nodes in source.values:
        gpus = "deployment.gpus_per_node"
        ranks = source.whole(gpus) or 8
    if ranks is None:
        return
    if not source.setting.is_fixed:
        source.count_devices(count * ranks)
    source.translate(gpus, {"cluster.devices_per_node": ranks})
    source.translate(nodes, {"cluster.nodes": count})


def _read_memory(source: ImportSource) -> None:
    """Import recomputation and offload; prime-rl has both on by default."""
    mode = source.get("model.ac.mode", "full" if source.values.get("model.ac", {}) == {} else None)
    if "model.ac" in source.values and source.values["model.ac"] is None:
        mode = "none"
    if mode is not None:
        for key in ("model.ac.mode", "model.ac"):
            source.translate(key, {"layout.recompute": mode})
        source.imply("layout.recompute", mode, "model.ac, by default full")
    moved = "params" if source.get("model.fsdp_cpu_offload") is True else None
    if moved is None and source.get("model.optim_cpu_offload", True) is True:
        moved = "optimizer"
    source.imply("layout.offload", moved or "none", "model.optim_cpu_offload, by default true")
    for key in ("model.fsdp_cpu_offload", "model.optim_cpu_offload"):
        source.translate(key, {"layout.offload": moved or "none"})
    if source.get("model.ac_offloading") is not None or moved is None:
        for key in [k for k in source.values if k.startswith("model.ac_offloading")]:
            source.miss(key, "one kind of state is offloaded; nearest: layout.offload")
    compiled = source.values.get("model.compile", {})
    source.translate("model.compile", {"train.compile": compiled is not None})
    source.fill("train.compile", True, "prime-rl's default of model.compile")


def _read_lengths(source: ImportSource) -> None:
    key = "data.seq_len" if "data.seq_len" in source.values else "model.seq_len"
    if (length := source.whole(key)) is not None:
        source.honour(key, {"train.seq_len": length})
        source.honour("model.seq_len", note=f"{key} says it")
