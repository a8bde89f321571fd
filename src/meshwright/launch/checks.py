"""What is refused before a process starts: another device, too little memory, no tokenizer."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from meshwright.data.store import is_store
from meshwright.errors import ConfigError, refusal
from meshwright.launch.machine import gpu_name
from meshwright.launch.planned import setting_on
from meshwright.layout import Layout, Machine
from meshwright.spec.loading import Config
from meshwright.spec.stored import stored_tokenizer
from meshwright.units import format_bytes


def check_extras(config: Config) -> None:
    """Refuse a tracker whose package is not installed."""
    wanted = {"tensorboard": config.log.tensorboard, "wandb": config.log.wandb}
    wanted["trackio"] = config.log.trackio
    for name, value in wanted.items():
        if value and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.{name} is set, but {name} is not installed: pip install 'meshwright[{name}]'"
            )


def check_device(config: Config, machine: Machine) -> None:
    """Refuse a cluster of the catalogue that this machine is known not to be."""
    preset = config.cluster.preset
    if preset == "local":
        return
    # Only here: a run on the machine at hand starts without the catalogue.
    from meshwright.predict.catalogue import device_named, find_device

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
    """Refuse to train a stored model on a tokenizer that nobody has named."""
    init_from, data = config.model.init_from, config.data
    if init_from is None or config.origins.get("data.tokenizer") != "default":
        return
    if all(is_store(Path(source)) for source in data.sources):  # which bring their own
        return
    raise ConfigError(
        f"model.init_from = {init_from!r} does not say which tokenizer it was trained with: give "
        "data.tokenizer"
    )


def check_memory(config: Config, layout: Layout, machine: Machine) -> str:
    """Return what is predicted of the memory here; refuses what is more than there is.

    Tensors alone are counted: what cannot hold these cannot hold the rest.
    """
    try:
        setting = setting_on(config, machine, layout)
    except ConfigError as error:  # a device that the catalogue lacks
        return f"not known: {error}"
    from meshwright.predict.price import worst_memory

    needed = worst_memory(setting, layout).allocated
    text = f"predicted {format_bytes(needed)} of tensors on the worst rank"
    if machine.device == "cuda":
        room, here = setting.cluster.device.memory, 1
    else:
        here = -(-layout.world // config.cluster.nodes)
        room = memory_of_machine()[1]
        text += f", {here} of them on this machine" if here > 1 else ""
    if room and needed * here > room:
        hint = f"`meshwright plan --after-oom '{layout.label}'` lists what would fit"
        rule = f"the layout {layout.label} does not fit: {text}; {format_bytes(room)} are free"
        raise ConfigError(refusal(rule, hint=hint))
    return text


def memory_of_machine() -> tuple[int, int]:
    """Return the bytes of memory in all and available, 0 where the system does not say."""
    path = Path("/proc/meminfo")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = (re.search(rf"{key}:\s+(\d+) kB", text) for key in ("MemTotal", "MemAvailable"))
    total, free = (int(match[1]) * 1024 if match else 0 for match in found)
    return total, free


def tokenizer_note(config: Config) -> str | None:
    """Return what is to be said where a stored model gets another tokenizer than its own."""
    init_from, given = config.model.init_from, config.data.tokenizer
    own = None if init_from is None else stored_tokenizer(Path(init_from))
    if own is None or given == own[0] or Path(given).resolve() == Path(own[0]).resolve():
        return None
    if Path(given).is_dir() and Path(given).resolve() == Path(own[0]).resolve().parent:
        return None
    return (
        f"data.tokenizer = {given!r}, but model.init_from was trained with {own[0]}: its ids mean "
        "other texts"
    )
