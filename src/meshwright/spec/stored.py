"""Finds the architecture of a stored model: in a Meshwright step, or in a `config.json`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

from pydantic import ValidationError

from meshwright.errors import CheckpointError, ConfigError
from meshwright.files import read_text
from meshwright.parsing import parse_json, parse_toml
from meshwright.spec import hub
from meshwright.spec.hf import spec_from_hf
from meshwright.spec.hf_shapes import planned_from_hf
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import DataFormat
from meshwright.store import Place, StorePath, place

SPEC: Final = "model.json"
CONFIG: Final = "config.toml"
HF_CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
ADAPTER_CONFIG: Final = "adapter_config.json"  # of a PEFT folder
PLAN: Final = "plan.json"
BEST: Final = "best"  # the pointer to the step with the lowest held-out loss
_STEP: Final = re.compile(r"step-(\d{8,})")

P = TypeVar("P", bound=Place)


def find_step(folder: Path) -> Path | None:
    """Return the step folder that `folder` is, or the newest one of a run or a folder of steps.

    `best` in a run or a folder of steps is its step with the lowest held-out loss. Raises
    `CheckpointError` for a run whose steps are in an object store.
    """
    if (folder / SPEC).is_file():
        return folder
    if folder.name == BEST and not folder.is_dir():
        roots = (_local_steps(folder.parent), folder.parent)
        return next(filter(None, map(best_step, roots)), None)
    for root in (_local_steps(folder), folder):
        steps = [p for p in root.glob("step-*") if _STEP.fullmatch(p.name) and p.is_dir()]
        if steps:
            return max(steps, key=lambda path: int(path.name.removeprefix("step-")))
    return None


def _local_steps(run: Path) -> Path:
    root = steps_folder(run)
    if isinstance(root, StorePath):
        raise CheckpointError(
            f"the steps of {run} are in {root}, and this reads a folder: bring one here with "
            f"`meshwright checkpoint fetch {root} OUT`, and give OUT"
        )
    return root


def best_step(root: P) -> P | None:
    """Return the step that a folder of steps has kept as the best, if it still exists."""
    try:
        name = read_text(root / BEST).strip()
    except (OSError, ValueError):
        return None
    is_kept = _STEP.fullmatch(name) and (root / name).is_dir()
    return cast(P, root / name) if is_kept else None


def steps_folder(run: Path) -> Place:
    """Return where a run saves its steps: its config's `checkpoint.dir`, or its own folder.

    Ignores a config that cannot be read.
    """
    section = None
    with suppress(OSError, ValueError):
        text = read_text(run / CONFIG)
        section = parse_toml(text).get("checkpoint")
    folder = section.get("dir") if isinstance(section, Mapping) else None
    is_path = isinstance(folder, str) and folder and "\0" not in folder
    return place(str(folder)) if is_path else run / "checkpoints"


def stored_spec(folder: Path, *, plans: bool = False) -> tuple[ModelSpec, Path]:
    """Return the architecture of a run, step or Hugging Face folder, and its file.

    That of a folder of adapters is its base model's. With `plans`, that of a type without modules
    here is read from its shapes, to be planned. Raises `CheckpointError` for another folder,
    `ConfigError` for a file that describes no valid model.
    """
    folder = base_of_adapter(folder) or folder
    step = find_step(folder)
    path = folder / HF_CONFIG if step is None else step / SPEC
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a Hugging Face model folder: {path} is missing")
    content = read_object(path)
    try:
        read = planned_from_hf if plans else spec_from_hf
        return (read(content) if step is None else ModelSpec(**content)), path
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (ValidationError, TypeError) as error:
        raise ConfigError(f"{path} describes no valid model: {error}") from error


class StoredTokenizer(NamedTuple):
    """A tokenizer's name or path, its eos token and the ids that begin texts, if these are known.

    `form` is the `data.format` that the model was trained on, "text" if that is unknown.
    """

    name: str
    eos: str | None = None
    bos: tuple[int, ...] | None = None
    form: DataFormat = "text"


def stored_tokenizer(path: Path) -> StoredTokenizer | None:
    """Return the tokenizer of a run, step or Hugging Face folder; None if the folder does not say.

    Adapters without one have their base model's. Raises `ConfigError` for a run's plan that cannot
    be read.
    """
    if not (path / TOKENIZER).is_file() and (base := base_of_adapter(path)) is not None:
        path = base
    for folder in (path, *path.resolve().parents[:2]):
        plan, known = folder / PLAN, StoredTokenizer(str(folder / TOKENIZER))
        content = read_object(plan) if plan.is_file() else {}
        record = content.get("tokenizer")
        if isinstance(record, Mapping):  # else it is a plan of `plan --save`
            if record.get("file") is None:
                return StoredTokenizer(str(record.get("name")))
            bos = tuple(record.get("bos") or ())  # a plan without it is of a run without BOS
            known = StoredTokenizer(known.name, record.get("eos"), bos, _format_of(content))
        if (folder / TOKENIZER).is_file():
            return known
    return None


def _format_of(plan: Mapping[str, Any]) -> DataFormat:
    config = plan.get("config")
    data = config.get("data") if isinstance(config, Mapping) else None
    return "chat" if isinstance(data, Mapping) and data.get("format") == "chat" else "text"


def base_of_adapter(folder: Path, find: Callable[[str], Path] = hub.folder_of) -> Path | None:
    """Return the base model's folder that a PEFT folder of adapters names; None for another folder.

    `find` finds that of an id of the Hub. Raises `ConfigError` if the adapters name neither such an
    id nor a folder of this machine.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file() or (folder / HF_CONFIG).is_file():
        return None
    content = read_object(path)
    base, revision = content.get("base_model_name_or_path"), content.get("revision")
    if isinstance(base, str) and base and "\0" not in base:
        for candidate in (Path(base), folder / base):
            if candidate.is_dir():
                return candidate
        name = f"{base}@{revision}" if revision else base
        if hub.hub_id(name) is not None:
            try:
                return find(name)
            except ConfigError as error:
                raise ConfigError(f"{folder} holds adapters of {name!r}: {error}") from error
    raise ConfigError(
        f"{folder} holds adapters of the model {base!r}, which is not a folder here: download that "
        f"model, and write its folder into {path} as base_model_name_or_path"
    )


def stored_base(path: Path) -> str | None:
    """Return the folder of a run's initial weights, if its config names one."""
    for folder in (path, *path.resolve().parents[:2]):
        with suppress(OSError, ValueError):
            model = parse_toml(read_text(folder / CONFIG)).get("model")
            init_from = model.get("init_from") if isinstance(model, Mapping) else None
            return init_from if isinstance(init_from, str) else None
    return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises `ConfigError` if there is none."""
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} is not a JSON object")
    return dict(content)
