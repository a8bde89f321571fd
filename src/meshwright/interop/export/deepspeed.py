"""A plan as DeepSpeed's JSON (DeepSpeed 0.19.8, docs/_pages/config-json.md)."""

from __future__ import annotations

from typing import Any

from meshwright.errors import ConfigError
from meshwright.interop.export.source import PlanSource

_ZERO = "zero_optimization"


def deepspeed_keys(source: PlanSource) -> dict[str, Any]:
    """Return the keys of DeepSpeed's JSON, such as `zero_optimization.stage`."""
    layout, train = source.layout, source.config.train
    keys: dict[str, Any] = {
        "train_batch_size": train.batch,
        "train_micro_batch_size_per_gpu": layout.microbatch,
        "gradient_accumulation_steps": source.accumulation,
        f"{_ZERO}.stage": layout.zero,
    }
    if layout.offload != "none":
        state = "param" if layout.offload == "params" else "optimizer"
        keys[f"{_ZERO}.offload_{state}.device"] = "cpu"
        if state == "param":
            keys[f"{_ZERO}.offload_optimizer.device"] = "cpu"
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
