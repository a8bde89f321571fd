"""Refusals before a process starts: a missing device, too little memory, no tokenizer."""

from __future__ import annotations

import importlib.util
import math
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from meshwright.data.store import is_store
from meshwright.errors import ConfigError, refusal
from meshwright.layout import Layout, Machine
from meshwright.runtime.machines.accelerators import (
    check_build,
    check_torch,
    find_gpus,
    torch_build,
)
from meshwright.runtime.machines.machine import gpu_name, memory_of_machine
from meshwright.runtime.pricing.planned import cost_inputs_on
from meshwright.spec.loading import Config
from meshwright.units import MIB, format_bytes

# What ranks hold between steps.
_STATES: Final = ("weights", "gradients", "optimizer")
# What a CPU rank needs besides tensors: measured were 4 to 20 MiB, by the layout. With less no
# thread can start, and the C library ends the process without a word of Python's.
_OWN: Final = 24 * MIB

# Files that one rank has open, and those that each connection to another rank adds. A rank alone
# trains with 32, two ranks each with 48, four with 64 (torch 2.13, gloo).
_FILES: Final = 32
_FILES_OF_A_PEER: Final = 8
_USUAL_FILES: Final = 1024  # Linux's default


def check_extras(config: Config) -> None:
    """Refuse an experiment tracker whose package is not installed."""
    wanted = {"tensorboard": config.log.tensorboard, "wandb": config.log.wandb}
    wanted["trackio"] = config.log.trackio
    for name, value in wanted.items():
        if value and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.{name} is set, but {name} is not installed: pip install 'meshwright[{name}]'"
            )


def check_device(config: Config, machine: Machine, environ: Mapping[str, str]) -> None:
    """Refuse GPUs that this torch cannot use, and a cluster that isn't this machine.

    The cluster is one of the catalogue.
    """
    check_torch("training")
    check_build(machine.device, find_gpus(environ), torch_build())
    preset = config.cluster.preset
    if preset == "local":
        return
    # Only here: `train --help` starts without the catalogue.
    from meshwright.cost.catalogue import device_named, find_device

    name = gpu_name() if machine.device == "cuda" else None
    known = None if name is None else device_named(name)
    if machine.device == "cpu":
        is_other = find_device(preset).kind != "cpu"
    else:
        is_other = known is not None and known.name != preset
    if is_other:
        rule = f"cluster.preset = {preset!r}, but this machine has {name or machine.name}"
        hint = "A preset is what a run is planned for. cluster.preset=local runs it on this machine"
        raise ConfigError(refusal(rule, hint=hint))


def check_tokenizer(config: Config) -> None:
    """Refuse to train a stored model if nobody has named its tokenizer."""
    init_from, data = config.model.init_from, config.data
    if init_from is None or config.origins.get("data.tokenizer") != "default":
        return
    if all(is_store(Path(source)) for source in data.sources):  # which bring their own
        return
    raise ConfigError(
        f"model.init_from = {init_from!r} does not say which tokenizer it was trained with: give "
        "data.tokenizer"
    )


def open_files(layout: Layout) -> int:
    """Return how many files and connections a rank of a layout has open, about.

    Each group of an axis has a connection to each of its ranks, and so has the group of all.
    """
    axes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    peers = sum(size - 1 for size in (layout.world, *axes))
    return _FILES + _FILES_OF_A_PEER * peers


def allow_open_files(layout: Layout) -> None:
    """Raise this process's limit of open files to what ranks need, which inherit it.

    Raises `ConfigError` if the system does not allow as many.
    """
    needed = open_files(layout)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        rule = f"the layout {layout.label} needs about {needed} open files and connections a rank"
        raise ConfigError(refusal(f"{rule}, but the limit is {hard}", hint=f"ulimit -n {needed}"))
    wanted = max(2 * needed, _USUAL_FILES)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def check_limit(config: Config, layout: Layout, machine: Machine) -> None:
    """Refuse a `cluster.memory` on a CPU that is too small for any step of a layout.

    Counts what the ranks always hold and the memory of their threads. Whether the activations fit
    shows only in a step; then the rank's error says what helps.
    """
    limit = config.cluster.memory
    if limit is None or machine.device != "cpu":
        return
    # Not above: `train --help` starts without it.
    from meshwright.cost.price import memory

    setting = cost_inputs_on(config, machine, layout)
    states = max(
        sum(
            term.bytes
            for term in memory(setting, layout, pp_rank).terms
            if term.category in _STATES
        )
        for pp_rank in range(layout.pp)
    )
    needed = states + _OWN
    if limit < needed:
        rule = (
            f"cluster.memory = {format_bytes(limit)} is less than a rank needs: "
            f"{format_bytes(states)} for its weights, gradients and optimizer states, and "
            f"{format_bytes(_OWN)} for its threads and messages"
        )
        raise ConfigError(refusal(rule, legal=[f"cluster.memory={math.ceil(needed / MIB)}MiB"]))


def check_memory(config: Config, layout: Layout, machine: Machine) -> str:
    """Return a line on predicted memory; raises `ConfigError` if it exceeds what is free.

    Only tensors are counted: if these do not fit, nothing does.
    """
    try:
        setting = cost_inputs_on(config, machine, layout)
    except ConfigError as error:  # a device that the catalogue lacks
        return f"not known: {error}"
    from meshwright.cost.price import memory

    stages = [memory(setting, layout, pp_rank).allocated for pp_rank in range(layout.pp)]
    text = f"predicted {format_bytes(max(stages))} of tensors on the worst rank"
    if machine.device == "cuda":
        needed, available, limit_text = (
            max(stages),
            setting.cluster.device.memory,
            "a device has {}",
        )
    else:
        # Of all ranks that run here; each node runs as many.
        needed = sum(stages) * layout.world / layout.pp / config.cluster.nodes
        available, limit_text = memory_of_machine()[1], "{} are free"
        if layout.world > config.cluster.nodes:
            text += f", {format_bytes(needed)} on all ranks of this machine"
    if available and needed > available:
        hint = f"`meshwright plan --after-oom '{layout.label}'` lists what would fit"
        limit = limit_text.format(format_bytes(available))
        rule = f"the layout {layout.label} does not fit: {text}; {limit}"
        raise ConfigError(refusal(rule, hint=hint))
    return text
