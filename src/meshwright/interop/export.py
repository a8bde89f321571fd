"""Writes a plan as another trainer's config, and reads it back to find what it cannot express."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import yaml

from meshwright.errors import ConfigError
from meshwright.interop.deepspeed import deepspeed_keys
from meshwright.interop.hugging_face_trainers import (
    accelerate_keys,
    axolotl_keys,
    transformers_keys,
)
from meshwright.interop.importing import Imported, import_values
from meshwright.interop.megatron import megatron_keys, nemo_keys, swift_keys
from meshwright.interop.plan_source import OWN_KEYS, PlanSource
from meshwright.interop.torchtitan import torchtitan_keys
from meshwright.interop.trainers import Trainer
from meshwright.layout import Layout, Machine, resolve_layout
from meshwright.spec.dump import toml_value
from meshwright.spec.loading import build_config
from meshwright.version import __version__

_KEYS: Final[Mapping[str, Callable[[PlanSource], dict[str, Any]]]] = {
    "accelerate": accelerate_keys,
    "axolotl": axolotl_keys,
    "deepspeed": deepspeed_keys,
    "megatron": megatron_keys,
    "ms-swift": swift_keys,
    "nemo": nemo_keys,
    "torchtitan": torchtitan_keys,
    "transformers": transformers_keys,
}
# Layout keys that only matter where a degree is above 1.
_IDLE: Final = {"sp": "tp", "cp_kind": "cp", "etp": "tp", "schedule": "pp"}


# Fields of a model that say where it comes from.
_MODEL_NAMES: Final = ("preset", "init_from")


class Written(NamedTuple):
    """A plan as another trainer's config: its flat keys, the text of the file, and its notes.

    `command` starts a training with it. `notes` are settings that the file cannot contain.
    """

    keys: dict[str, Any]
    text: str
    command: str
    notes: list[str]


def written(trainer: Trainer, source: PlanSource, file: str) -> Written:
    """Return a plan as a trainer's config; raises `ConfigError` for what this cannot express.

    The keys are imported again, and must give the same layout. `file` is the path of the file.
    """
    keys = keys_of(trainer, source)
    _check_read_back(trainer, source, keys)
    names = {"file": shlex.quote(file), "nodes": source.nodes, "per_node": source.per_node}
    return Written(
        keys, render(trainer, keys), trainer.command.format(**names), _notes(trainer, source)
    )


def keys_of(trainer: Trainer, source: PlanSource) -> dict[str, Any]:
    """Return a plan as a trainer's flat keys.

    Raises `ConfigError` for what these cannot express.
    """
    reason = trainer.refusal(source.layout, source.config.model.n_layers)
    if reason is not None:
        raise ConfigError(reason)
    elsewhere = {*trainer.says, *trainer.scripted, *OWN_KEYS}
    unsaid = [key for key in source.stated() if key not in elsewhere]
    usual = {"train.compile": (False, "auto")}  # no trainer compiles unless it is told to
    unsaid = [
        key
        for key in unsaid
        if source.value(key) not in (*usual.get(key, ()), _default(source, key))
    ]
    if unsaid:
        listed = ", ".join(f"{key} = {toml_value(source.value(key))}" for key in unsaid)
        raise ConfigError(f"{trainer.name} ({trainer.file}) cannot say {listed}; leave it out")
    return _KEYS[trainer.name](source)


def _default(source: PlanSource, key: str) -> Any:
    section, _, name = key.partition(".")
    return type(getattr(source.config, section)).model_fields[name].get_default()


def read_back(trainer: Trainer, keys: Mapping[str, Any], source: PlanSource) -> Imported:
    """Return the import of a written config, as `config import` would read it."""
    config, base = source.config, dict[str, Any]()
    if "model.preset" not in keys and source.config.model.preset is not None:
        base = {"model.preset": config.model.preset}
    elif config.model.init_from is not None:
        base = {"model.init_from": config.model.init_from}
    if trainer.name == "megatron":
        base = {}
    if trainer.name == "accelerate":
        base |= {"train.batch": config.train.batch, "layout.microbatch": source.layout.microbatch}
    base |= {"train.seq_len": config.train.seq_len}
    if trainer.name == "nemo":
        base.pop("model.preset", None)
    return import_values(
        dict(keys), trainer.name, base=base, devices=source.devices, accepted=("all",)
    )


def layout_of(imported: Imported, devices: int) -> Layout:
    """Return the layout that an import gives on `devices` devices; raises `ConfigError`."""
    config = build_config({name: dict(values) for name, values in imported.given.items()})
    cluster = config.cluster.model_copy(update={"nodes": 1})
    config = config.model_copy(update={"cluster": cluster})
    return resolve_layout(config, Machine("cuda", devices, 1, "to import", is_fixed=True))


def differing(
    layout: Layout, other: Layout, ignored: Mapping[str, str]
) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two layouts differ, with both values.

    Leaves out keys in `ignored`, and those without effect, such as `sp` if `tp` is 1.
    """
    differences = {}
    for key, value in layout.model_dump().items():
        other_value = getattr(other, key)
        idle = key in _IDLE and getattr(layout, _IDLE[key]) == 1
        if value != other_value and not idle and key not in ignored:
            differences[key] = (value, other_value)
    return differences


def _check_read_back(trainer: Trainer, source: PlanSource, keys: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a trainer's keys, imported again, give another layout or model."""
    imported = read_back(trainer, keys, source)
    other = layout_of(imported, source.devices)
    differences = differing(source.layout, other, trainer.beside)
    losses = [
        f"layout.{key} = {value} (it would be {imported_value})"
        for key, (value, imported_value) in differences.items()
    ]
    if trainer.name == "megatron":
        config = build_config({name: dict(values) for name, values in imported.given.items()})
        identity, imported_identity = (
            model.identity() for model in (source.config.model, config.model)
        )
        losses += [
            f"model.{key} = {identity[key]} (it would be {imported_identity.get(key)})"
            for key in identity
            if identity[key] != imported_identity.get(key) and key not in _MODEL_NAMES
        ]
    if losses:
        raise ConfigError(f"{trainer.name} ({trainer.file}) cannot say {'; '.join(losses)}")


def _notes(trainer: Trainer, source: PlanSource) -> list[str]:
    notes = [
        f"layout.{key} = {getattr(source.layout, key)} is {how}"
        for key, how in trainer.beside.items()
    ]
    scripted = [key for key in source.stated() if key in trainer.scripted]
    if scripted:
        listed = ", ".join(f"{key} = {toml_value(source.value(key))}" for key in scripted)
        notes.append(f"{listed}: of your script, not of this file")
    left = [key for key in source.stated() if key in OWN_KEYS]
    if left:
        notes.append(f"{', '.join(left)}: of Meshwright's own loop, left out")
    return notes


def render(trainer: Trainer, keys: Mapping[str, Any]) -> str:
    """Return the text of a config file in the trainer's format."""
    head = f"{trainer.package} {trainer.version}, planned by meshwright {__version__}"
    if trainer.name == "megatron":
        return _script(head, keys)
    nested = nest(keys)
    if trainer.suffix == ".json":
        return json.dumps(nested, indent=2) + "\n"
    if trainer.suffix == ".toml":
        return f"# {head}\n{_toml(nested)}"
    return f"# {head}\n{yaml.safe_dump(nested, sort_keys=False)}"


def nest(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat keys as nested dicts: `a.b` becomes `b` in the dict `a`."""
    nested: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        table = nested
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return nested


def _toml(nested: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for section, values in nested.items():
        lines += [f"[{section}]", *(f"{name} = {toml_value(v)}" for name, v in values.items()), ""]
    return "\n".join(lines)


def _script(head: str, keys: Mapping[str, Any]) -> str:
    """Return Megatron-LM's arguments as a shell script that starts pretrain_gpt.py."""
    of_launcher = ("nproc-per-node", "nnodes")
    started = " ".join(f"--{name} {keys[name]}" for name in of_launcher if name in keys)
    arguments = [
        f"--{name}" if value is True else f"--{name} {shlex.quote(_plain(value))}"
        for name, value in keys.items()
        if name not in of_launcher and value is not False
    ]
    joined = " \\\n    ".join([f"torchrun {started} pretrain_gpt.py", *arguments, '"$@"'])
    return f"#!/bin/bash\n# {head}; data, tokenizer and checkpoints are your arguments\n{joined}\n"


def _plain(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
