"""Imports DeepSpeed's JSON, for what `deepspeed.toml` cannot express, and writes plans as JSON.

Source of the keys: DeepSpeed's docs/_pages/config-json.md (0.19.8 for what is written), and
runtime/config.py for those that the page omits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import ConfigError
from meshwright.interop.batch import Names, read_batch
from meshwright.interop.plan_source import PlanSource
from meshwright.interop.source import AUTO, ImportSource

BATCH = Names("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_ZERO = "zero_optimization"


def read_deepspeed(source: ImportSource) -> None:
    """Import a DeepSpeed config, giving every key its verdict."""
    read_parallel(source)
    read_precision(source)
    read_zero(source)
    read_own_defaults(source)
    read_sgd(source)
    read_scheduler(source)
    read_batch(source, BATCH)
    source.finish()


def read_parallel(source: ImportSource) -> None:
    """Import the degrees of tensor, sequence and pipeline parallelism."""
    for key, to in (
        ("tensor_parallel.autotp_size", "layout.tp"),
        ("tensor_parallel.tp_size", "layout.tp"),
        ("pipeline.stages", "layout.pp"),
    ):
        if source.get(key) == 0:
            source.honour(key, note="off")
        elif (size := source.whole(key)) is not None:
            source.honour(key, {to: size})
    _read_experts(source)
    size = source.whole("sequence_parallel_size")
    if size is not None:
        note = "heads are exchanged as Ulysses does"
        degree: dict[str, Any] = {"layout.cp": size}
        kind = {"layout.cp_kind": "ulysses"} if size > 1 else {}
        source.translate("sequence_parallel_size", degree | kind, note)


def _read_experts(source: ImportSource) -> None:
    """Import expert parallelism, in which tensor parallelism does not shard experts."""
    switch, key = "expert_parallel.enabled", "expert_parallel.expert_tensor_parallel_size"
    if source.get(switch) is not True:
        return
    tp = source.target("layout.tp") or 1
    to = {"layout.etp": 1} if tp > 1 else {}
    source.translate(switch, to, "layout.ep divides the experts that the model has")
    if source.get(key) == 1:
        source.honour(key, to)


def read_precision(source: ImportSource) -> None:
    """Import the switches of fp16, bf16 and autocast; fp16 with bf16 is a contradiction."""
    names = {"fp16.enabled": "fp16", "bf16.enabled": "bf16", "bfloat16.enabled": "bf16"}
    on = {key: to for key, to in names.items() if source.get(key) is True}
    if len(set(on.values())) > 1:
        source.contradict(list(on), f"{' and '.join(on)} are both true; keep one", [_PRECISION])
    for key, to in on.items():
        source.honour(key, {_PRECISION: to})
    for key in names:
        if source.values.get(key) is False:
            source.honour(key, note="off")
    if source.get("torch_autocast.enabled") is True:
        _read_autocast(source)
    is_auto = any(source.values.get(key) == AUTO for key in names)
    if source.target(_PRECISION) is None and not is_auto:
        source.fill(_PRECISION, "fp32", "DeepSpeed trains in fp32 unless fp16 or bf16 is enabled")


_PRECISION = "train.precision"


def _read_autocast(source: ImportSource) -> None:
    dtype = str(source.get("torch_autocast.dtype", "bfloat16")).removeprefix("torch.")
    to = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    if to is None:
        reason = f"no autocast to {dtype}; train.precision has fp32, bf16, fp16"
        source.refuse("torch_autocast.enabled", reason, settled_by=[_PRECISION])
        return
    note = "all blocks compute in it, with fp32 weights kept by the optimizer"
    source.translate("torch_autocast.enabled", {_PRECISION: to}, note)
    source.translate("torch_autocast.dtype", {_PRECISION: to})


def read_zero(source: ImportSource) -> None:
    """Import the ZeRO stage and the offload of parameters and optimizer states."""
    source.take(f"{_ZERO}.stage")
    devices = {
        f"{_ZERO}.offload_param.device": "params",
        f"{_ZERO}.cpu_offload_param": "params",
        f"{_ZERO}.offload_optimizer.device": "optimizer",
        f"{_ZERO}.cpu_offload": "optimizer",
    }
    settings = {key: source.get(key) for key in devices}
    targets = [to for key, to in devices.items() if settings[key] not in (None, False, "none")]
    best = "params" if "params" in targets else "optimizer"
    for key, value in settings.items():
        if value in (False, "none"):
            source.honour(key, note="off")
        elif value == "nvme":
            source.miss(key, "no offload to disk; nearest: device = cpu, layout.offload")
        elif value in (True, "cpu"):
            note = "" if devices[key] == best else "params offloads the optimizer's states too"
            source.translate(key, {"layout.offload": best}, note)
    _read_mics(source)
    read_saved_inputs(source, "activation_checkpointing.cpu_checkpointing")


def read_saved_inputs(source: ImportSource, key: str) -> None:
    """Import the switch that offloads the saved inputs of recomputed blocks to the host."""
    if source.get(key) is not True:
        source.honour(key, note="off")
    elif source.target("layout.offload") in (None, "none", "activations"):
        source.translate(key, {"layout.offload": "activations"}, "with layout.recompute = full")
    else:
        source.miss(key, "one kind of state is offloaded; nearest: layout.offload = activations")


def _read_mics(source: ImportSource) -> None:
    key = f"{_ZERO}.mics_shard_size"
    if source.get(key) == -1:
        source.honour(key, note="off")
        return
    size, devices = source.whole(key), source.setting.devices
    if size is None:
        return
    if devices % size:
        source.contradict([key], f"{size} does not divide {devices} devices")
        return
    to = {"layout.dp_shard": size, "layout.dp_replicate": devices // size}
    source.translate(key, to, "shards in groups, replicates over them")


_SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "WarmupLR": {"optimizer.schedule": "constant"},
    "WarmupDecayLR": {"optimizer.schedule": "linear", "optimizer.min_lr_ratio": 0.0},
    "WarmupCosineLR": {"optimizer.schedule": "cosine"},
}


def read_own_defaults(source: ImportSource) -> None:
    """Fill in DeepSpeed's defaults of optimizers where Meshwright's differ."""
    kind = source.get("optimizer.type")
    if kind == "Muon":
        _read_muon(source)
    if kind == "Lion" and source.get("optimizer.params.betas") is None:
        source.fill("optimizer.betas", [0.9, 0.99], "DeepSpeed's default for Lion")


def _read_muon(source: ImportSource) -> None:
    """Fill in the defaults of Muon and of the Adam beside it, and import a rate that both have.

    Source: DeepSpeed's runtime/zero/muon/original_muon.py, MuonWithAuxAdam; its engine gives the
    parameters of each their own rate where the config has one, else the common one.
    """
    params = "optimizer.params."
    source.fill("optimizer.scale", "original", "DeepSpeed's Muon is Keller Jordan's")
    if source.get(f"{params}betas") is None:
        source.fill("optimizer.betas", [0.9, 0.95], "DeepSpeed's default beside Muon")
    if source.get(f"{params}eps") is None:
        source.fill("optimizer.eps", 1e-10, "DeepSpeed's default beside Muon")
    rate = source.number(f"{params}lr", 0.0)
    of_muon = source.number(f"{params}muon_lr", rate or 0.02)
    of_adam = source.number(f"{params}adam_lr", rate or 3e-4)
    if of_muon == of_adam:
        for name in ("muon_lr", "adam_lr"):
            source.translate(f"{params}{name}", {"optimizer.lr": of_muon})
        if of_muon != rate:
            source.ignore(f"{params}lr", "muon_lr and adam_lr override it")
    elif not rate:
        reason = "Muon and its AdamW have one rate; nearest: optimizer.groups, by name"
        source.refuse(f"{params}lr", reason, settled_by=["optimizer.lr"], default=of_muon)


def read_sgd(source: ImportSource, decay: str = "optimizer.params.weight_decay") -> None:
    """Refuse the key `decay` of an imported config if it asks SGD with momentum for weight decay.

    DeepSpeed adds the decay to gradients, so it passes through the momentum; Meshwright's decay is
    decoupled from it. Without momentum, both are the same and nothing is refused. The other keys
    of SGD are read elsewhere.
    """
    momentum = source.number("optimizer.params.momentum", 0.0)
    if source.get("optimizer.type") == "SGD" and momentum and source.number(decay, 0.0):
        reason = "SGD adds it to gradients, so that momentum keeps it; here it is decoupled"
        source.refuse(decay, f"{reason}. Nearest: 0", settled_by=["optimizer.weight_decay"])


def read_scheduler(source: ImportSource) -> None:
    """Import the learning-rate schedule: warm-up, then constant, linear or cosine decay."""
    kind = source.get("scheduler.type")
    if kind is None:
        return
    to = _SCHEDULES.get(str(kind))
    params = "scheduler.params."
    if to is None:
        reason = "optimizer.schedule has cosine, linear, wsd and constant after a linear warm-up"
        source.refuse("scheduler.type", f"no {kind}: {reason}", settled_by=["optimizer.schedule"])
        for key in [key for key in source.values if key.startswith(params)]:
            source.miss(key, f"of {kind}")
        return
    shape = source.get(f"{params}warmup_type", "log")
    is_curved = shape != "linear"
    curved = "the warm-up is linear here, DeepSpeed's is logarithmic" if is_curved else ""
    source.translate("scheduler.type", to, curved)
    if is_curved:
        source.miss(f"{params}warmup_type", "the warm-up is linear; nearest: linear")
    else:
        source.honour(f"{params}warmup_type", note="linear")
    if kind == "WarmupCosineLR" and source.values.get(f"{params}cos_min_ratio") != AUTO:
        ratio = source.number(f"{params}cos_min_ratio", 0.0001)
        source.honour(f"{params}cos_min_ratio", {"optimizer.min_lr_ratio": ratio})
        if source.target("optimizer.min_lr_ratio") != ratio:
            source.fill("optimizer.min_lr_ratio", ratio, "DeepSpeed's default of cos_min_ratio")
    steps = source.whole(f"{params}total_num_steps")
    if steps is not None:
        note = "the schedule ends where training does"
        source.translate(f"{params}total_num_steps", {"train.steps": steps}, note)
    _read_rates(source, params, kind)


def _read_rates(source: ImportSource, params: str, kind: str) -> None:
    highest, first = f"{params}warmup_max_lr", f"{params}warmup_min_lr"
    if source.get(highest) is not None:
        lr = source.number(highest, 0.0)
        source.honour(highest, {"optimizer.lr": lr})
        stated = source.get("optimizer.params.lr")
        if stated is not None and stated != lr:
            reason = f"the scheduler's warmup_max_lr = {lr:g} takes its place, as in DeepSpeed"
            source.ignore("optimizer.params.lr", reason)
    elif kind == "WarmupDecayLR" and source.values.get(highest) is None:
        reason = "DeepSpeed's default of warmup_max_lr"
        source.imply("optimizer.lr", 0.001, reason)
        source.ignore("optimizer.params.lr", f"{reason} = 0.001 takes its place, as in DeepSpeed")
    for key in (first, f"{params}warmup_min_ratio"):
        if source.get(key) in (0, 0.0):
            source.honour(key, note="warm-up from nothing")
        elif source.get(key) is not None:
            source.miss(key, "the warm-up starts from nothing")
    steps = f"{params}warmup_num_steps"
    if source.get(steps) == 0:
        source.honour(steps, {"optimizer.warmup_steps": 0})
    elif (count := source.whole(steps)) is not None:
        source.honour(steps, {"optimizer.warmup_steps": count})
    elif steps not in source.values:
        source.fill("optimizer.warmup_steps", 1000, f"DeepSpeed's default of {steps}")


_STAGES = "zero_optimization"


def deepspeed_keys(source: PlanSource) -> dict[str, Any]:
    """Return a plan as keys of DeepSpeed's JSON, such as `zero_optimization.stage`."""
    layout, train = source.layout, source.config.train
    keys: dict[str, Any] = {
        "train_batch_size": train.batch,
        "train_micro_batch_size_per_gpu": layout.microbatch,
        "gradient_accumulation_steps": source.accumulation,
        f"{_STAGES}.stage": layout.zero,
    }
    if layout.offload != "none":
        state = "param" if layout.offload == "params" else "optimizer"
        keys[f"{_STAGES}.offload_{state}.device"] = "cpu"
        if state == "param":
            keys[f"{_STAGES}.offload_optimizer.device"] = "cpu"
    if layout.tp > 1:
        keys["tensor_parallel.autotp_size"] = layout.tp
    if layout.cp > 1:
        keys["sequence_parallel_size"] = layout.cp
    if train.precision != "fp32":
        keys[f"{train.precision}.enabled"] = True
    if source.is_stated("train.clip_norm"):
        keys["gradient_clipping"] = train.clip_norm
    if source.is_stated("train.reduce_dtype") and train.reduce_dtype == "fp32":
        keys["communication_data_type"] = "fp32"
    return keys | _optimizer(source)


def _optimizer(source: PlanSource) -> dict[str, Any]:
    optimizer = source.config.optimizer
    params = "optimizer.params."
    given = source.given(
        {
            "optimizer.lr": f"{params}lr",
            "optimizer.eps": f"{params}eps",
            "optimizer.weight_decay": f"{params}weight_decay",
        }
    )
    if source.is_stated("optimizer.betas"):
        given[f"{params}betas"] = list(optimizer.betas)
    if optimizer.name != "adamw" and given:
        raise ConfigError(f"optimizer.name = {optimizer.name!r} is the script's; nearest: adamw")
    return {"optimizer.type": "AdamW", **given} if given else {}
