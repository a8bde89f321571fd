"""FSDP's settings, as accelerate, transformers and axolotl have them under one name or another.

Source: accelerate 1.15.0, utils/dataclasses.py, FullyShardedDataParallelPlugin; transformers
5.23.0, training_args.py; axolotl 0.19.0, utils/schemas/fsdp.py.
"""

from __future__ import annotations

from typing import Final

from meshwright.interop.degrees import degree, imply_sharding
from meshwright.interop.source import ImportSource

# FSDP1's strategies: whether weights are freed after the forward; None: they are not sharded.
STRATEGIES: Final[dict[str, bool | None]] = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": None,
    "1": True,
    "2": False,
    "3": None,
    "4": True,
    "5": False,
    "TRUE": True,
    "FALSE": False,
}


def read_fsdp(source: ImportSource, prefix: str) -> None:
    """Take the sharding, the recomputation and the offload of an FSDP section.

    `prefix` is what its keys begin with, such as `fsdp_config.fsdp_`. Sets `layout.zero`.
    """
    reshard, strategy = f"{prefix}reshard_after_forward", f"{prefix}sharding_strategy"
    key = reshard if source.get(reshard) is not None else strategy
    mode = str(source.get(key, "FULL_SHARD")).upper()
    if mode not in STRATEGIES:
        names = ", ".join(list(STRATEGIES)[:5])
        source.contradict([key], f"{mode!r} is no strategy; legal: {names}", ["layout.zero"])
        return
    reshards = STRATEGIES[mode]
    if reshards is None:
        source.imply("layout.zero", 0, f"{key} = {mode}")
    else:
        imply_sharding(source, reshards=reshards, reason=f"{key} = {mode}")
    for name in (reshard, strategy):
        source.translate(name, {"layout.zero": source.target("layout.zero")})
    checkpoints = f"{prefix}activation_checkpointing"
    if source.get(checkpoints) is True:
        source.honour(checkpoints, {"layout.recompute": "full"})
    for name in (f"{prefix}offload_params", f"{prefix}cpu_offload"):
        if source.get(name) is True:
            source.translate(name, {"layout.offload": "params"}, "weights and optimizer states")
        elif source.get(name) is False:
            source.honour(name, note="off")


def read_recompute(source: ImportSource, key: str) -> None:
    """Take the switch that recomputes each block in the backward, unless FSDP has taken it."""
    if source.get(key) is True:
        source.honour(key, {"layout.recompute": "full"})
    elif source.get(key) is False:
        source.honour(key, note="off")
        if source.target("layout.recompute") is None:
            source.fill("layout.recompute", "none", f"{key} = false")


def read_context(source: ImportSource, key: str, kind: str) -> None:
    """Take ranks that share a sequence, as a ring or by Ulysses's exchange of heads."""
    if degree(source, "layout.cp") > 1:
        return
    size = source.whole(key)
    if size is not None:
        to = {"layout.cp": size} | ({"layout.cp_kind": kind} if size > 1 else {})
        source.translate(key, to)
