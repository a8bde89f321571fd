"""A plan as torchtitan's TOML (torchtitan 0.2.2, torchtitan/config/job_config.py)."""

from __future__ import annotations

import math
from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.interop.export.source import PlanSource
from meshwright.interop.torchtitan import DEGREES, GLOBAL, LOCAL, PARALLEL, SCHEDULE_NAMES

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
    """Return the keys of torchtitan's TOML by section and key."""
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
    """Return the keys of a pipeline whose stages have equal numbers of layers, as near as can be.

    Stages of as many layers as `layers_per_stage` must make as many stages as the layout has.
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
