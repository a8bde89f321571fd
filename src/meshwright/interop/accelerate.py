"""accelerate's YAML: what the table `accelerate.toml` cannot say row by row.

Source: accelerate 1.15.0, commands/config/cluster.py and commands/launch.py.
"""

from __future__ import annotations

from typing import Final

from meshwright.interop.degrees import degree, fill_shards, read_degrees
from meshwright.interop.fsdp import read_context, read_fsdp
from meshwright.interop.names import need_model
from meshwright.interop.source import ImportSource

PARALLEL: Final = "parallelism_config.parallelism_config_"
MEGATRON: Final = "megatron_lm_config.megatron_lm_"
FSDP: Final = "fsdp_config.fsdp_"
DEEPSPEED: Final = "deepspeed_config."


def read_accelerate(source: ImportSource) -> None:
    """Give every key of accelerate's YAML its verdict."""
    need_model(source, "(model)")
    _read_launcher(source)
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


def _read_launcher(source: ImportSource) -> None:
    """Take the number of ranks, where nothing else says it."""
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
