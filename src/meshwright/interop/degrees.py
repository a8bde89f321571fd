"""Shared by trainers on PyTorch: parallel degrees, settings of FSDP, and batch arithmetic.

accelerate, transformers and axolotl have FSDP's settings under different names. Source: accelerate
1.15.0, utils/dataclasses.py, FullyShardedDataParallelPlugin; transformers 5.23.0, training_args.py;
axolotl 0.19.0, utils/schemas/fsdp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from meshwright.interop.source import ImportSource

REPLICAS, SHARDS = "layout.dp_replicate", "layout.dp_shard"
_MODEL_RANKS = ("layout.pp", "layout.cp", "layout.tp")


def read_degrees(source: ImportSource, names: Mapping[str, str]) -> None:
    """Import parallel degrees; `names` maps the file's keys to layout keys.

    0 means off, and -1 that the degree follows from the number of devices.
    """
    for key, to in names.items():
        if source.get(key) in (0, -1):
            source.honour(key, note="off" if source.get(key) == 0 else "what is left")
            continue
        size = source.whole(key)
        if size is not None:
            source.honour(key, {to: size})


def degree(source: ImportSource, key: str) -> int:
    """Return the degree that the keys imported so far give the layout key `key`, by default 1."""
    return int(source.target(key) or 1)


def fill_shards(source: ImportSource, key: str, *, is_sharded: bool = True) -> None:
    """Set the data-parallel degree that the file leaves to the number of devices.

    `key` is the file's key for it, at which a contradiction is reported. The remaining ranks are
    shards if `is_sharded`, otherwise replicas.
    """
    if any(SHARDS in entry.to for entry in source.entries.values()):
        return
    filled_key = SHARDS if is_sharded else REPLICAS
    if not is_sharded and source.target(REPLICAS) is not None:
        return
    other_ranks = 1 if filled_key == REPLICAS else degree(source, REPLICAS)
    for name in _MODEL_RANKS:
        other_ranks *= degree(source, name)
    devices = source.setting.devices
    if devices % other_ranks:
        if not source.setting.is_fixed:
            source.imply(filled_key, 1, "the devices here are fewer than the file's degrees")
            return
        factors = " x ".join(f"{name} {degree(source, name)}" for name in (*_MODEL_RANKS, REPLICAS))
        nearest = max(1, round(devices / other_ranks)) * other_ranks
        reason = (
            f"{factors} = {other_ranks} ranks do not divide {devices} devices; "
            f"nearest: {nearest} devices"
        )
        source.contradict([key], reason, [filled_key])
        return
    source.imply(filled_key, devices // other_ranks, f"what {devices} devices leave")


def imply_sharding(source: ImportSource, *, reshards: bool, reason: str) -> None:
    """Set the ZeRO stage that FSDP corresponds to: 3 if it reshards after the forward, else 2.

    It is 0 if there is only one rank to shard over.
    """
    ranks = degree(source, SHARDS) * degree(source, "layout.cp")
    source.imply("layout.zero", (3 if reshards else 2) if ranks > 1 else 0, reason)


def read_precision(source: ImportSource, keys: Mapping[str, str], default: str | None) -> None:
    """Import precision switches such as bf16 and fp16; at most one may be on.

    `keys` maps each switch to its precision. `default` is the trainer's, or None.
    """
    on = [key for key in keys if str(source.get(key)).lower() == "true"]
    if len({keys[key] for key in on}) > 1:
        source.contradict(on, f"{' and '.join(on)} are both true; keep one", ["train.precision"])
    for key in keys:
        if key in on:
            source.honour(key, {"train.precision": keys[key]})
        elif source.get(key) is False:
            source.honour(key, note="off")
    is_auto = any(source.values.get(key) == "auto" for key in keys)
    if not on and default is not None and not is_auto:
        source.fill("train.precision", default, "the trainer's default")


def read_without_masters(source: ImportSource, key: str, value: object) -> None:
    """Import a key that makes weights and optimizer states bf16 if it is set to `value`.

    Only then it is translated, into `train.precision`, `train.master` and `optimizer.state_dtype`.
    """
    if key in source.values and source.values[key] == value:
        to = {"train.precision": "bf16", "train.master": "none", "optimizer.state_dtype": "bf16"}
        source.translate(key, to, "gradients are summed and kept in train.reduce_dtype")


class LocalBatch(NamedTuple):
    """A trainer's key for the sequences of a rank's microbatch, and their default.

    `accumulation` is its key for the microbatches of a step, `total` that for the global batch;
    None if the trainer has no such key.
    """

    micro: str
    default: int
    accumulation: str | None = None
    total: str | None = None


def data_ranks(source: ImportSource) -> int:
    """Return the number of data-parallel ranks, as imported so far."""
    return degree(source, REPLICAS) * degree(source, SHARDS)


def read_local_batch(source: ImportSource, names: LocalBatch) -> None:
    """Import microbatch, accumulation and global batch; contradictory numbers are reported."""
    ranks = data_ranks(source)
    micro = source.whole(names.micro) or names.default
    steps = source.whole(names.accumulation) if names.accumulation else None
    total = source.whole(names.total) if names.total else None
    local = micro * (steps or 1)
    if total is not None and (total != local * ranks if steps else total % (local * ranks)):
        nearest = max(1, round(total / (local * ranks))) * local * ranks
        factors = f"{names.micro} = {micro}" + (
            f" x {names.accumulation} = {steps}" if steps else ""
        )
        reason = (
            f"{names.total} = {total} is not {factors} x {ranks} data-parallel ranks; nearest: "
        )
        source.contradict([str(names.total)], f"{reason}{names.total} = {nearest}", ["train.batch"])
        return
    batch = local * ranks if total is None else total
    note = f"{batch // (micro * ranks)} x {micro} x {ranks} data-parallel ranks = {batch}"
    targets = {"layout.microbatch": micro, "train.batch": batch}
    source.translate(names.micro, targets, note)
    for key in (names.accumulation, names.total):
        if key is not None:
            source.translate(key, {"train.batch": batch}, note)
    if names.micro not in source.values:
        source.imply("layout.microbatch", micro, f"the trainer's default of {names.micro}")
        source.imply("train.batch", batch, note)


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
    """Import the sharding, recomputation and offload of an FSDP section; sets `layout.zero`.

    `prefix` is the beginning of its keys, such as `fsdp_config.fsdp_`.
    """
    reshard, strategy = f"{prefix}reshard_after_forward", f"{prefix}sharding_strategy"
    key = reshard if source.get(reshard) is not None else strategy
    mode = str(source.get(key, "FULL_SHARD")).upper()
    if mode not in STRATEGIES:
        names = ", ".join(list(STRATEGIES)[:5])
        source.contradict([key], f"{mode!r} is not a strategy; legal: {names}", ["layout.zero"])
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
    """Import the switch for full recomputation of blocks, unless the FSDP section has set it."""
    if source.get(key) is True:
        source.honour(key, {"layout.recompute": "full"})
    elif source.get(key) is False:
        source.honour(key, note="off")
        if source.target("layout.recompute") is None:
            source.fill("layout.recompute", "none", f"{key} = false")


def read_context(source: ImportSource, key: str, kind: str) -> None:
    """Import the degree of context parallelism; `kind` is "ring" or "ulysses"."""
    if degree(source, "layout.cp") > 1:
        return
    size = source.whole(key)
    if size is not None:
        to = {"layout.cp": size} | ({"layout.cp_kind": kind} if size > 1 else {})
        source.translate(key, to)
