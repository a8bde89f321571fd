"""Checks of `train.engine`, `train.fp8` and `train.async_tp`: the layout, GPUs and packages."""

from __future__ import annotations

import importlib.util

from meshwright.errors import ConfigError, refusal
from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES
from meshwright.program.optimizer import needs_matrices
from meshwright.runtime.machines.machine import Gpus, gpu_name
from meshwright.spec.loading import Config


def check_engine(config: Config, layout: Layout, *, resumes: bool) -> None:
    """Raise `ConfigError` if DeepSpeed's engine is not installed or does not support the config."""
    train = config.train
    if train.engine == "native":
        return
    wrong = {
        "layout.pp": (layout.pp, 1),
        "layout.cp": (layout.cp, 1),
        "layout.tp": (layout.tp, 1),
        "layout.ep": (layout.ep, 1),
        "layout.zero": (layout.zero, min(layout.zero, 2)),
        "layout.offload": (layout.offload, "none"),
        "data.streaming": (config.data.streaming, False),
        "train.compile": (train.is_compiled, False),
        "train.fp8": (train.fp8, False),
        # Its ZeRO gives the optimizer flat shards, of which nothing makes matrices.
        "optimizer.name": (
            config.optimizer.name,
            "adamw" if needs_matrices(config.optimizer) else config.optimizer.name,
        ),
        "optimizer.state_dtype": (config.optimizer.state_dtype, "fp32"),
        "train.master": (train.master, "fp32"),
        "train.async_tp": (train.async_tp, False),
        "lora.rank": (config.lora.rank, 0),
        "train.check_every": (train.check_every, 0),
        "train.stop_after_evals": (train.stop_after_evals, 0),
        "checkpoint.keep_best": (config.checkpoint.keep_best, False),
        "train.router_aux_loss": (train.router_aux_loss, 0),
        "train.router_z_loss": (train.router_z_loss, 0),
        "train.router_bias_rate": (train.router_bias_rate, 0),
        "train.expert_capacity": (train.expert_capacity, None),
        "train.routing": (train.routing, "learned"),
        "train.precision": (
            train.precision,
            "bf16" if train.precision == "fp16" else train.precision,
        ),
    }
    if layout.dp_shard > 1:
        wrong["layout.dp_replicate"] = (layout.dp_replicate, 1)
    for key, (value, legal) in wrong.items():
        if value != legal:
            rule = f'train.engine = "deepspeed" does not go with {key} = {value}'
            raise ConfigError(refusal(rule, legal=[f"{key} = {legal}", 'train.engine = "native"']))
    if resumes:
        raise ConfigError('--resume: train.engine = "deepspeed" keeps no state to resume from')
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "train.engine is set, but deepspeed is not installed: pip install "
            "'meshwright[deepspeed]'"
        )


def check_fp8(config: Config, device: str) -> None:
    """Raise `ConfigError` for `train.fp8` without torchao, or on a GPU without float8 matmuls."""
    if not config.train.fp8:
        return
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "train.fp8 is set, but torchao is not installed: pip install 'meshwright[fp8]'"
        )
    name = gpu_name() if device == "cuda" else None
    if name is None:  # a CPU rounds as a GPU would; what the catalogue lacks, its ranks look at
        return
    from meshwright.cost.catalogue import device_named

    known = device_named(name)
    if known is not None and "fp8" not in known.peaks:
        rule = f"train.fp8 = true, but {name} has no float8 matmuls"
        raise ConfigError(refusal(rule, legal=["train.fp8 = false"]))


def check_async_tp(config: Config, layout: Layout, device: str, gpus: Gpus | None) -> None:
    """Raise `ConfigError` for `train.async_tp` without compiled blocks or GPU shared memory."""
    if not config.train.async_tp:
        return
    per_node = config.cluster.devices_per_node or (gpus.visible if gpus is not None else layout.tp)
    rule = None
    if device != "cuda" or (gpus is not None and gpus.vendor != "NVIDIA"):
        rule = "it needs GPUs of NVIDIA, whose ranks share memory"
    elif not config.train.is_compiled:
        rule = f"the compiler does it, and train.compile = {str(config.train.compile).lower()}"
    elif layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward:
        rule = f"layout.schedule = {layout.schedule} leaves matmuls outside of what is compiled"
    elif layout.tp > per_node:
        rule = f"layout.tp = {layout.tp} ranks share memory on one node, which has {per_node} GPUs"
    if rule is not None:
        rule = f"train.async_tp = true: {rule}"
        raise ConfigError(refusal(rule, legal=["train.async_tp = false"]))
