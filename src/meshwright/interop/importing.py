"""Imports config files of another training system, as a Meshwright config and a report.

The system is detected from the content of the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import ConfigError, refusal
from meshwright.interop.deepspeed import read_deepspeed
from meshwright.interop.flat import (
    SYSTEMS,
    System,
    flatten,
    merge,
    read_arguments,
    read_mapping,
    read_text,
)
from meshwright.interop.gpt_neox import read_gpt_neox
from meshwright.interop.hugging_face import read_hugging_face
from meshwright.interop.hugging_face_trainers import read_accelerate, read_axolotl, read_trainer
from meshwright.interop.import_report import Filled, KeyReport, Report
from meshwright.interop.megatron import read_megatron
from meshwright.interop.on_megatron import (
    MEGATRON_KEYS,
    read_nemo,
    read_swift,
    spelled_as_megatron,
    spelled_as_swift,
)
from meshwright.interop.on_megatron import SECTIONS as OF_BRIDGE
from meshwright.interop.prime_rl import read_prime_rl
from meshwright.interop.source import ImportSettings, ImportSource
from meshwright.interop.table import load_table
from meshwright.interop.torchtitan import read_torchtitan
from meshwright.spec.dump import toml_value
from meshwright.spec.loading import SECTIONS, read_given
from meshwright.spec.resolve import Value, Values

# GPT-NeoX's configs may be JSON too; these keys are none of DeepSpeed's.
_NEOX_KEYS = frozenset(("num_layers", "pipe_parallel_size", "vocab_file", "train_iters"))
_SWIFT_KEYS = frozenset(("dataset", "train_type", "tuner_type")) | MEGATRON_KEYS
_TRAINER_KEYS = frozenset(
    {
        *("per_device_train_batch_size", "model_name_or_path", "distributed_config"),
        *("gradient_checkpointing", "learning_rate", "fsdp", "output_dir"),
    }
)
_ACCELERATE_KEYS = frozenset(
    {
        *("compute_environment", "distributed_type", "downcast_bf16", "main_training_function"),
        *("parallelism_config", "megatron_lm_config", "num_processes"),
    }
)
_OPTION = re.compile(r"(?m)(^|\s)--[a-z][\w-]+")
_OVERRIDE = re.compile(r"(?m)(^|\s)\+{0,2}(model|train|ddp|optimizer|scheduler)\.\w+=")


def detect_system(path: Path) -> System:
    """Return the system whose config a file is; raises `ConfigError` if it is not recognized."""
    if path.suffix == ".toml":
        return _of_toml(path, read_mapping(path))
    if path.suffix in (".json", ".yml", ".yaml"):
        content = {name.replace("-", "_"): value for name, value in read_mapping(path).items()}
        return _of_mapping(content, is_json=path.suffix == ".json")
    return _of_text(path, read_text(path))


def _of_toml(path: Path, content: Mapping[str, Any]) -> System:
    model = content.get("model", {})
    is_table = isinstance(model, Mapping)
    if content.keys() & {"parallelism", "job", "activation_checkpoint", "lr_scheduler"}:
        return "torchtitan"
    if is_table and "flavor" in model:
        return "torchtitan"
    if content.keys() & {"ckpt", "optim", "deployment", "trainer", "orchestrator", "max_steps"}:
        return "prime-rl"
    raise _unknown(path)


def _of_mapping(content: Mapping[str, Any], *, is_json: bool) -> System:
    names = content.keys()
    if names & _ACCELERATE_KEYS:
        return "accelerate"
    if "base_model" in names:
        return "axolotl"
    if isinstance(content.get("model"), str) and names & _SWIFT_KEYS:
        return "ms-swift"
    if names & {"model_type", "architectures"} and "model" not in names:
        return "hf"
    if _is_bridge(content):
        return "nemo"
    if names & _TRAINER_KEYS and not names & {"zero_optimization", *_NEOX_KEYS}:
        return "transformers"
    return "deepspeed" if is_json and not names & _NEOX_KEYS else "gpt-neox"


def _is_bridge(content: Mapping[str, Any]) -> bool:
    sections = [name for name in (*OF_BRIDGE, "trainer") if isinstance(content.get(name), Mapping)]
    dotted = any(name.partition(".")[0] in OF_BRIDGE for name in content if "." in name)
    return dotted or "recipe" in content or (len(sections) > 0 and "model" in sections)


def _of_text(path: Path, text: str) -> System:
    if re.search(r"(?m)(^|\s)--(parallelism|job|training)\.", text):
        return "torchtitan"
    if re.search(r"\b(megatron|swift) (sft|pt|rlhf)\b", text):
        return "ms-swift"
    if re.search(r"--(per_device_train_batch_size|model_name_or_path)\b", text):
        return "transformers"
    if _OVERRIDE.search(text):
        return "nemo"
    if _OPTION.search(text):
        return "megatron"
    raise _unknown(path)


def _unknown(path: Path) -> ConfigError:
    rule = f"nothing in {path} says which system's config it is"
    hint = "--from says so"
    return ConfigError(refusal(rule, legal=[f"--from {name}" for name in SYSTEMS], hint=hint))


def read_overrides(text: str) -> dict[str, Any]:
    """Return the `section.key=value` arguments of a command line, as for NeMo's scripts."""
    overrides: dict[str, Any] = {}
    for name, value in re.findall(r"(?m)(?:^|\s)\+{0,2}((?:\w+\.)+\w+)=(\S+)", text):
        overrides[name] = _typed(value.strip("\"'\\"))
    return overrides


def _typed(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word.lower() in ("null", "none"):
        return None
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


_READERS: Mapping[System, tuple[Callable[[ImportSource], None], tuple[str, ...]]] = {
    "accelerate": (read_accelerate, ("accelerate",)),
    "axolotl": (read_axolotl, ("axolotl",)),
    "deepspeed": (read_deepspeed, ("deepspeed",)),
    "gpt-neox": (read_gpt_neox, ("gpt_neox", "deepspeed")),
    "hf": (read_hugging_face, ("hf",)),
    "megatron": (read_megatron, ("megatron",)),
    "ms-swift": (read_swift, ("ms_swift", "megatron", "transformers")),
    "nemo": (read_nemo, ("nemo", "megatron")),
    "prime-rl": (read_prime_rl, ("prime_rl",)),
    "torchtitan": (read_torchtitan, ("torchtitan",)),
    "transformers": (read_trainer, ("transformers",)),
}
# Systems whose keys are another's under other spellings.
_SPELLINGS: Mapping[System, Callable[[Mapping[str, Any]], dict[str, str]]] = {
    "nemo": spelled_as_megatron,
    "ms-swift": spelled_as_swift,
}
# Those whose command lines are not Megatron-LM's, and have underscores.
_UNDERSCORED: tuple[System, ...] = ("torchtitan", "transformers")
_EXTRA = "deepspeed_extra_args."


class Imported(NamedTuple):
    """The report of an import, and the config values: of the base, the files and the overrides.

    Later ones take precedence.
    """

    report: Report
    given: dict[str, Values]


def import_files(
    paths: Sequence[Path],
    *,
    system: System | None = None,
    base: Path | None = None,
    overrides: Iterable[str] = (),
    devices: int = 1,
    is_fixed: bool = False,
    accepted: Sequence[str] = (),
) -> Imported:
    """Import the config files of one system; GPT-NeoX may have several, which are merged.

    Values in the files replace those of the base config, and overrides replace both. A key that the
    files lack has the other system's default, unless the base config sets it. `devices` is the
    number of ranks in the batch arithmetic; `is_fixed` is whether the user gave it. `accepted`
    names unsupported keys that may be dropped ("all": every one). Raises `ConfigError` for files
    that cannot be read; unsupported keys are in the report.
    """
    stated, over = read_given(base), read_given(None, list(overrides))
    known = system or detect_system(paths[0])
    if known != "gpt-neox" and len(paths) > 1:
        raise ConfigError(f"{known} has one config file, but there are {len(paths)}")
    values, clashes = _read_all(paths, known)
    if not values:
        raise ConfigError(f"{paths[0]} has no keys")
    setting = ImportSettings(
        _by_name(stated) | _by_name(over), tuple(_by_name(over)), devices, is_fixed
    )
    files = tuple(path.name for path in paths)
    keys = _Keys(known, files, values, clashes)
    return _import_keys(keys, stated, over, setting, accepted)


def import_values(
    values: dict[str, Any],
    system: System,
    *,
    base: Mapping[str, Any],
    devices: int,
    accepted: Sequence[str] = (),
) -> Imported:
    """Import flat keys of a system's config, over base values by `section.key`."""
    stated: dict[str, Values] = {name: {} for name in SECTIONS}
    for key, value in base.items():
        section, _, name = key.partition(".")
        stated[section][name] = Value(value, "given")
    setting = ImportSettings(dict(base), tuple(base), devices, is_fixed=True)
    keys = _Keys(system, (f"{system}'s config",), values, {})
    return _import_keys(keys, stated, {}, setting, accepted)


class _Keys(NamedTuple):
    """The flat keys of a system's files, and the keys that occur with different values."""

    system: System
    files: tuple[str, ...]
    values: dict[str, Any]
    clashes: dict[str, str]


def _import_keys(
    keys: _Keys,
    stated: Mapping[str, Values],
    over: Mapping[str, Values],
    setting: ImportSettings,
    accepted: Sequence[str],
) -> Imported:
    """Give each key its verdict, and return the report with the resulting config values.

    `stated` are the values of the base config, `over` the overrides.
    """
    reader, tables = _READERS[keys.system]
    spelling = _SPELLINGS[keys.system](keys.values) if keys.system in _SPELLINGS else {}
    written_keys = {spelling.get(key, key): key for key in keys.values}
    values = {spelling.get(key, key): value for key, value in keys.values.items()}
    source = ImportSource(values, [load_table(name) for name in tables], setting)
    reader(source)
    for key, how in keys.clashes.items():
        row = source.tables[0].find(key)
        source.contradict([key], f"{how}; keep one", [row.to] if row and row.to else [])
    entries = [
        replace(entry, key=written_keys.get(entry.key, entry.key)) for entry in _ordered(source)
    ]
    refused = [entry for entry in entries if entry.refuses(accepted, setting.given)]
    settled = tuple(
        entry if entry in refused else _overridden(entry, _by_name(over)) for entry in entries
    )
    report = Report(keys.system, keys.files, settled, tuple(source.filled), tuple(refused))
    given = _compose(report, stated, over)
    return Imported(replace(report, filled=tuple(_in_effect(report, given))), given)


def _overridden(entry: KeyReport, over: Mapping[str, Any]) -> KeyReport:
    """Return a key's verdict without the values that overrides have replaced."""
    settles = (*entry.to, *entry.settled_by)
    overrides = {
        key: over[key] for key in settles if key in over and over[key] != entry.to.get(key)
    }
    if not overrides:
        return entry
    note = f"given: {', '.join(f'{key} = {toml_value(value)}' for key, value in overrides.items())}"
    remaining = {key: value for key, value in entry.to.items() if key not in overrides}
    if remaining:
        return replace(entry, to=remaining, note="; ".join(filter(None, (note, entry.note))))
    return replace(entry, verdict="ignored", to={}, note=note)


def _in_effect(report: Report, config_values: Mapping[str, Values]) -> Iterator[Filled]:
    """Yield the filled-in keys that nothing else has set."""
    for filled in report.filled:
        section, _, key = filled.key.partition(".")
        if config_values[section][key].origin == _origin(filled):
            yield filled


def _origin(filled: Filled) -> str:
    return f"import: {filled.reason}"


def _ordered(source: ImportSource) -> tuple[Any, ...]:
    """Return the verdicts in the order of the files, followed by those on omitted keys."""
    of_file = [source.entries[key] for key in source.values]
    return (*of_file, *(entry for entry in source.entries.values() if entry.is_default))


def _read_all(paths: Sequence[Path], system: System) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of all files, and a description of keys that have different values."""
    if paths[0].suffix in (".json", ".yml", ".yaml", ".toml") and system != "megatron":
        return merge({path.name: _read(path, system) for path in paths})
    text, name = read_text(paths[0]), str(paths[0])
    if system == "nemo":
        return read_overrides(text), {}
    values, clashes = read_arguments(text, name)
    if system == "megatron":
        return values, clashes
    values = {key: _switched(value) for key, value in values.items()}
    if system not in _UNDERSCORED:
        return values, clashes
    return (
        {key.replace("-", "_"): value for key, value in values.items()},
        {key.replace("-", "_"): how for key, how in clashes.items()},
    )


def _switched(value: Any) -> Any:
    """Return the booleans that "true" and "false" denote; other values are unchanged."""
    return {"True": True, "true": True, "False": False, "false": False}.get(str(value), value)


def _read(path: Path, system: System) -> dict[str, Any]:
    content = read_mapping(path)
    if system == "hf":
        return content
    flat = flatten(content, dashes=system == "gpt-neox")
    return {key.removeprefix(_EXTRA): value for key, value in flat.items()}


def _by_name(sections: Mapping[str, Values]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value.value
        for section, values in sections.items()
        for key, value in values.items()
    }


def _compose(
    report: Report, stated: Mapping[str, Values], over: Mapping[str, Values]
) -> dict[str, Values]:
    """Return the config values of an import, merged in order of precedence."""
    config_values: dict[str, Values] = {name: {} for name in SECTIONS}

    def put(name: str, value: Any, origin: str) -> None:
        section, _, key = name.partition(".")
        config_values[section][key] = Value(value, origin)

    for section, values in stated.items():
        config_values[section].update(values)
    if report.system == "hf":  # the model is the file's as a whole
        config_values["model"] = {}
    for filled in report.filled:
        section, _, key = filled.key.partition(".")
        if key not in config_values[section] or not filled.is_default:
            put(filled.key, filled.value, _origin(filled))
    where = " + ".join(report.files)
    for entry in report.entries:
        for name, value in entry.to.items():
            put(name, value, f"{where}: {entry.key}")
    for section, values in over.items():
        config_values[section].update(values)
    return config_values


def refusal_text(report: Report) -> str:
    """Return the message of a refused import: each key, its value, the reason, and the remedy."""
    keys = "1 key" if len(report.refused) == 1 else f"{len(report.refused)} keys"
    lines = [f"{keys} of {' + '.join(report.files)} cannot be taken over:"]
    for entry in report.refused:
        suffix = " (left out)" if entry.is_default else ""
        lines.append(f"  {entry.key} = {entry.value!r}{suffix}: {entry.note}")
    refused = [entry for entry in report.refused if entry.verdict == "unsupported"]
    names = [entry.key for entry in refused if not entry.is_final]
    if names and len(names) == len(refused):
        lines.append(f"To continue without them: --accept {','.join(names)}")
    return "\n".join(lines)
