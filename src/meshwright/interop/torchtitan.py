"""Imports torchtitan's TOML, for what `torchtitan.toml` cannot express, and writes plans as it.

Source of the keys and defaults: torchtitan 0.2.2, torchtitan/config/job_config.py; of the stages
torchtitan/distributed/pipeline_parallel.py, of DDP and FSDP2 models/llama3/infra/parallelize.py.
"""

from __future__ import annotations

import math
from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.interop.degrees import (
    LocalBatch,
    data_ranks,
    degree,
    fill_shards,
    imply_sharding,
    read_degrees,
    read_local_batch,
    read_without_masters,
)
from meshwright.interop.names import model_names
from meshwright.interop.plan_source import PlanSource
from meshwright.interop.source import ImportSource
from meshwright.layout.schedules import SCHEDULES
from meshwright.spec.presets import PRESETS

PARALLEL: Final = "parallelism."
LOCAL, GLOBAL = "training.local_batch_size", "training.global_batch_size"
DEGREES: Final = {
    f"{PARALLEL}data_parallel_replicate_degree": "layout.dp_replicate",
    f"{PARALLEL}data_parallel_shard_degree": "layout.dp_shard",
    f"{PARALLEL}tensor_parallel_degree": "layout.tp",
    f"{PARALLEL}pipeline_parallel_degree": "layout.pp",
    f"{PARALLEL}context_parallel_degree": "layout.cp",
    f"{PARALLEL}expert_parallel_degree": "layout.ep",
}
# torch.distributed.pipelining's names.
SCHEDULE_NAMES: Final = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved_1f1b",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zero_bubble",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}


def read_torchtitan(source: ImportSource) -> None:
    """Import torchtitan's TOML, giving every key its verdict."""
    _read_model(source)
    read_degrees(source, DEGREES)
    fill_shards(source, f"{PARALLEL}data_parallel_shard_degree")
    _read_sharding(source)
    _read_experts(source)
    _read_pipeline(source)
    _read_recompute(source)
    read_without_masters(source, "training.dtype", "bfloat16")
    _read_batch(source)
    _read_schedule(source)
    source.finish()


def _read_model(source: ImportSource) -> None:
    module, flavor = source.get("model.name", "llama3"), source.get("model.flavor")
    for preset, names in model_names().items():
        if names.torchtitan == (module, flavor):
            source.translate("model.flavor", {"model.preset": preset})
            source.honour("model.name", {"model.preset": preset})
    settled = ["model.preset", "model.init_from"]
    reason = "no preset of this name; nearest: model.preset"
    for key in ("model.flavor", "model.name"):
        source.refuse(
            key, reason, settled_by=settled, default="debugmodel" if key[6] == "f" else None
        )
    converters = source.get("model.converters", [])
    fp8 = [name for name in converters if str(name).startswith("quantize.linear.float8")]
    if converters and len(fp8) == len(converters):
        source.translate("model.converters", {"train.fp8": True})
    elif not converters:
        source.honour("model.converters", note="none")
    for key in [key for key in source.values if key.startswith("quantize.")]:
        if not fp8:
            source.ignore(key, "of model.converters")
        elif key.endswith("recipe_name") and source.get(key) not in ("tensorwise", None):
            source.refuse(key, "tensors are scaled at each use; nearest: tensorwise")
        else:
            source.ignore(key, "of how float8 is computed")


def _read_sharding(source: ImportSource) -> None:
    """Import FSDP2; by default, a pipeline does not reshard weights after the forward."""
    key = f"{PARALLEL}fsdp_reshard_after_forward"
    policy = source.get(key, "default")
    reshards = policy == "always" or (policy == "default" and degree(source, "layout.pp") == 1)
    imply_sharding(source, reshards=reshards, reason=f"{key} = {policy}")
    source.translate(key, {"layout.zero": source.target("layout.zero")})
    source.imply("layout.sp", degree(source, "layout.tp") > 1, "of tensor parallelism, always")


def _read_experts(source: ImportSource) -> None:
    key = f"{PARALLEL}expert_tensor_parallel_degree"
    width, tp = source.get(key, 1), degree(source, "layout.tp")
    if degree(source, "layout.ep") == 1:
        source.honour(key, note="off")
        return
    if key in source.values:
        source.honour(key, {"layout.etp": width})
    elif tp > 1:
        source.imply("layout.etp", 1, f"torchtitan's default of {key}")


def _read_pipeline(source: ImportSource) -> None:
    pp = degree(source, "layout.pp")
    name = f"{PARALLEL}pipeline_parallel_schedule"
    if pp == 1:
        source.honour(name, note="one pipeline rank has all layers")
        return
    schedule_name = str(source.get(name, "1F1B"))
    schedule = SCHEDULE_NAMES.get(schedule_name)
    if schedule is None:
        legal = ", ".join(SCHEDULE_NAMES)
        source.contradict(
            [name], f"{schedule_name!r} is not a schedule; legal: {legal}", ["layout.schedule"]
        )
        return
    source.translate(name, {"layout.schedule": schedule})
    source.imply("layout.schedule", schedule, f"{name} = {schedule_name}")
    is_single = SCHEDULES[schedule].min_virtual == 1 and SCHEDULES[schedule].max_virtual == 1
    virtual = 1 if is_single else 2
    per_stage = source.whole(f"{PARALLEL}pipeline_parallel_layers_per_stage")
    layers = _layers(source)
    if per_stage is not None and layers is not None:
        ends = [
            int(source.get(f"{PARALLEL}pipeline_parallel_{end}_stage_less_layers", 1))
            for end in ("first", "last")
        ]
        stages = math.ceil((layers + sum(ends)) / per_stage)
        if stages % pp:
            reason = (
                f"{stages} stages of {per_stage} layers do not divide among {pp} pipeline ranks"
            )
            source.contradict([f"{PARALLEL}pipeline_parallel_layers_per_stage"], reason)
            return
        virtual = stages // pp
    to = {"layout.virtual_stages": virtual}
    source.translate(f"{PARALLEL}pipeline_parallel_layers_per_stage", to)
    if per_stage is None:
        source.imply("layout.virtual_stages", virtual, f"torchtitan's default of {schedule_name}")


def _layers(source: ImportSource) -> int | None:
    """Return the model's number of layers, or None if it is not known yet."""
    layers = source.target("model.n_layers")
    preset = source.target("model.preset")
    return layers or (PRESETS[preset]["n_layers"] if preset in PRESETS else None)


def _read_recompute(source: ImportSource) -> None:
    mode = str(source.get("activation_checkpoint.mode", "selective"))
    option = "activation_checkpoint.selective_ac_option"
    if mode in ("none", "full"):
        source.honour("activation_checkpoint.mode", {"layout.recompute": mode})
    elif mode == "selective" and source.get(option, "2") == "op":
        source.honour("activation_checkpoint.mode", {"layout.recompute": "selective"})
        source.translate(option, {"layout.recompute": "selective"})
        source.imply("layout.recompute", "selective", f"{option} = op")
    elif mode == "selective":
        source.honour("activation_checkpoint.mode", note=f"with {option}")
        reason = "every block is recomputed by itself, or none; nearest: op"
        source.refuse(option, reason, settled_by=["layout.recompute"], default="2")


def _read_batch(source: ImportSource) -> None:
    """Import the batch; with a pipeline, the local batch is all microbatches of a step."""
    if source.get(GLOBAL) == -1:
        source.honour(GLOBAL, note="what the local batches make")
        total = None
    else:
        total = source.whole(GLOBAL)
    if degree(source, "layout.pp") == 1:
        read_local_batch(source, LocalBatch(LOCAL, 8, total=None if total is None else GLOBAL))
        return
    local = source.whole(LOCAL) or 8
    key = f"{PARALLEL}pipeline_parallel_microbatch_size"
    ranks = data_ranks(source)
    micro = source.whole(key) or 1
    if total is not None and total != local * ranks:
        nearest = f"{LOCAL} = {total // ranks}" if total % ranks == 0 else f"{GLOBAL} = {local}"
        reason = (
            f"a step is one pass through the pipeline, so {GLOBAL} = {total} must be {LOCAL} = "
        )
        reason = f"{reason}{local} x {ranks} data-parallel ranks; nearest: {nearest}"
        source.contradict([GLOBAL], reason, ["train.batch"])
        return
    note = f"{local} x {ranks} data-parallel ranks"
    source.translate(LOCAL, {"train.batch": local * ranks}, note)
    source.honour(GLOBAL, {"train.batch": local * ranks})
    if LOCAL not in source.values:
        source.imply("train.batch", local * ranks, f"torchtitan's default of {LOCAL}")
    source.honour(key, {"layout.microbatch": micro})
    if key not in source.values:
        source.imply("layout.microbatch", micro, f"torchtitan's default of {key}")


def _read_schedule(source: ImportSource) -> None:
    betas = [source.number("optimizer.beta1", 0.9), source.number("optimizer.beta2", 0.95)]
    for key in ("optimizer.beta1", "optimizer.beta2"):
        source.translate(key, {"optimizer.betas": betas})
    if source.target("optimizer.betas") is None:
        source.fill("optimizer.betas", betas, "torchtitan's default of beta1, beta2")
    kind, ratio = source.get("lr_scheduler.decay_type", "linear"), "lr_scheduler.decay_ratio"
    share = source.get(ratio)
    if share is not None:
        steps = source.whole("training.steps") or 10000
        source.translate(ratio, {"optimizer.decay_steps": max(1, round(steps * float(share)))})
        to = {"optimizer.schedule": "wsd"} if kind == "linear" else None
    else:
        to = {"optimizer.schedule": kind} if kind in ("linear", "cosine") else None
    if to is not None:
        source.translate("lr_scheduler.decay_type", to)
        if "lr_scheduler.decay_type" not in source.values:
            source.fill("optimizer.schedule", to["optimizer.schedule"], "torchtitan's default")


_GIVEN: Final = {
    "train.steps": "training.steps",
    "train.clip_norm": "training.max_norm",
    "train.seed": "debug.seed",
    "train.async_tp": f"{PARALLEL}enable_async_tensor_parallel",
    "optimizer.lr": "optimizer.lr",
    "optimizer.eps": "optimizer.eps",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.warmup_steps": "lr_scheduler.warmup_steps",
    "optimizer.min_lr_ratio": "lr_scheduler.min_lr_factor",
}
_DECAYS: Final = {"linear": "linear", "cosine": "cosine", "wsd": "linear"}


def torchtitan_keys(source: PlanSource) -> dict[str, Any]:
    """Return a plan as torchtitan's keys, `section.key`."""
    layout, train = source.layout, source.config.train
    module, flavor = _model(source)
    single = layout.pp == 1
    keys: dict[str, Any] = {
        "model.name": module,
        "model.flavor": flavor,
        LOCAL: layout.microbatch if single else train.batch // layout.dp,
        GLOBAL: train.batch,
        "training.seq_len": train.seq_len,
        "training.mixed_precision_param": _dtype(source),
        "training.enable_cpu_offload": layout.offload == "params",
        **{name: getattr(layout, ours.partition(".")[2]) for name, ours in DEGREES.items()},
        f"{PARALLEL}fsdp_reshard_after_forward": "never" if layout.zero == 2 else "always",
        "activation_checkpoint.mode": layout.recompute,
    }
    if layout.recompute == "selective":
        keys["activation_checkpoint.selective_ac_option"] = "op"
    if layout.ep > 1:
        keys[f"{PARALLEL}expert_tensor_parallel_degree"] = layout.expert_tp
    if layout.cp > 1:
        keys[f"{PARALLEL}context_parallel_rotate_method"] = "alltoall"
    if not single:
        keys |= _pipeline(source)
    return keys | source.given(_GIVEN) | _optimizer(source)


def _model(source: PlanSource) -> tuple[str, str]:
    source.check_named_model()
    if len(source.names.torchtitan) != 2:
        raise ConfigError(
            f"torchtitan has no flavor of model.preset = {source.config.model.preset!r}; it has "
            "those of llama3, qwen3, deepseek_v3 and gpt_oss"
        )
    module, flavor = source.names.torchtitan
    return module, flavor


def _dtype(source: PlanSource) -> str:
    precision = source.config.train.precision
    if precision == "fp16":
        raise ConfigError("torchtitan has no train.precision = fp16; nearest: bf16, fp32")
    return {"bf16": "bfloat16", "fp32": "float32"}[precision]


def _pipeline(source: PlanSource) -> dict[str, Any]:
    """Return torchtitan's pipeline keys, with layers per stage as equal as possible.

    Raises `ConfigError` if torchtitan's rule gives another number of stages than the layout has.
    """
    layout, layers = source.layout, source.config.model.n_layers
    per_stage = math.ceil(layers / layout.stages)
    if math.ceil(layers / per_stage) != layout.stages:
        raise ConfigError(
            f"torchtitan divides {layers} layers into stages of {per_stage}, which are "
            f"{math.ceil(layers / per_stage)}, not {layout.stages} stages"
        )
    names = {ours: name for name, ours in SCHEDULE_NAMES.items()}
    return {
        f"{PARALLEL}pipeline_parallel_schedule": names[layout.schedule],
        f"{PARALLEL}pipeline_parallel_microbatch_size": layout.microbatch,
        f"{PARALLEL}pipeline_parallel_layers_per_stage": per_stage,
        f"{PARALLEL}pipeline_parallel_first_stage_less_layers": 0,
        f"{PARALLEL}pipeline_parallel_last_stage_less_layers": 0,
    }


def _optimizer(source: PlanSource) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    optimizer, train = source.config.optimizer, source.config.train
    if train.compile is True:
        keys["compile.enable"] = True
    if source.is_stated("optimizer.betas"):
        keys["optimizer.beta1"], keys["optimizer.beta2"] = optimizer.betas
    if optimizer.name != "adamw":
        raise ConfigError(f"torchtitan has no optimizer.name = {optimizer.name!r}; nearest: adamw")
    if train.master == "none":
        if optimizer.state_dtype != "bf16":
            rule = "torchtitan has optimizer.state_dtype = bf16 beside train.master = none"
            raise ConfigError(f"{rule}; nearest: optimizer.state_dtype = bf16")
        keys["training.dtype"] = "bfloat16"
    elif optimizer.state_dtype == "int8":
        raise ConfigError("torchtitan has no optimizer.state_dtype = int8; nearest: bf16")
    elif optimizer.state_dtype == "bf16":
        keys["optimizer.implementation"] = "fused_opt_states_bf16"
    if train.reduce_dtype != "fp32":
        raise ConfigError("torchtitan sums gradients in fp32; nearest: train.reduce_dtype = fp32")
    if source.is_stated("optimizer.schedule"):
        if optimizer.schedule not in _DECAYS:
            raise ConfigError(
                f"torchtitan has no optimizer.schedule = {optimizer.schedule!r}; nearest: "
                f"{', '.join(_DECAYS)}"
            )
        keys["lr_scheduler.decay_type"] = _DECAYS[optimizer.schedule]
        if optimizer.schedule == "wsd":
            share = (optimizer.decay_steps or train.steps // 5) / train.steps
            keys["lr_scheduler.decay_ratio"] = round(share, 6)
    return keys
