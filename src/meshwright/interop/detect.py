"""Whose config a file is, by what is in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, refusal
from meshwright.interop.flat import SYSTEMS, System, read_mapping, read_text
from meshwright.interop.on_megatron import MEGATRON_KEYS
from meshwright.interop.on_megatron import SECTIONS as OF_BRIDGE

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
    """Return the system whose config a file is; raises `ConfigError` where none is known."""
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
    rule = f"{path} is no config that is known by what is in it"
    hint = "--from says which system's it is"
    return ConfigError(refusal(rule, legal=[f"--from {name}" for name in SYSTEMS], hint=hint))


def read_overrides(text: str) -> dict[str, Any]:
    """Return the `section.key=value` of a command line, as NeMo's scripts take them."""
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
