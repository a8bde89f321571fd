"""Finds models and tokenizers by their ids on the Hugging Face Hub: `owner/name[@REVISION]`.

Files are downloaded by `huggingface_hub` into its cache, which other libraries share. It alone
reads the environment: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. A commit's files never
change, so the files of an id with a commit are downloaded once, and read without a network from
then on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshwright.errors import ConfigError, refusal
from meshwright.files import read_text
from meshwright.spec.presets import preset_of
from meshwright.units import format_bytes

Say = Callable[[str], None]

_WORD: Final = r"[A-Za-z0-9][\w.-]{0,95}"
_ID: Final = re.compile(rf"({_WORD}/{_WORD})(?:@(\w[\w./-]*))?")
_FILE: Final = re.compile(r"\.(jsonl?|toml|ya?ml|txt|jinja|model|safetensors|bin|pt)$")
_COMMIT: Final = re.compile("[0-9a-f]{40}")
_DIGITS: Final = 7  # of a commit, as shown
_INDEX: Final = "model.safetensors.index.json"
# What a plan, a tokenizer and a chat template need: all but weights.
_SMALL: Final = (
    *("config.json", "generation_config.json", _INDEX, "adapter_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
)
_MODEL: Final = "model.safetensors"
_ADAPTERS: Final = "adapter_model.safetensors"


class HubId(NamedTuple):
    """A repository on the Hub (`owner/name`), with a branch, tag or commit."""

    repository: str
    revision: str = "main"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a full commit hash, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        revision = self.revision[:_DIGITS] if self.is_pinned else self.revision
        return f"{self.repository} at {revision}"


def hub_id(text: str | Path) -> HubId | None:
    """Return the Hub id that a text stands for; None if it is a path.

    It is a path if such a file or folder exists, if its parent folder exists (and it has no
    `@REVISION`), or if it ends like a file's name. So a local folder always takes precedence.
    """
    match = _ID.fullmatch(str(text))
    if match is None or _FILE.search(match[1]):
        return None
    if Path(text).exists() or (match[2] is None and Path(match[1]).parent.is_dir()):
        return None
    return HubId(match[1], match[2] or "main")


def repository_name(text: str) -> str:
    """Return a text that names a repository, `owner/name`; raise `ConfigError` for another one."""
    match = _ID.fullmatch(text)
    if match is None or match[2] is not None:
        rule = f"{text!r} is not a repository of the Hub"
        raise ConfigError(refusal(rule, hint="Its name has two parts: owner/name"))
    return text


def is_model(word: str) -> bool:
    """Whether a word is a Hub id of a model for which there is no preset."""
    return hub_id(word) is not None and preset_of(word) is None


def pinned(text: str) -> str:
    """Return `owner/name@COMMIT` for a Hub id, with the newest commit of its revision; a path
    unchanged.

    Raises `ConfigError` if the Hub cannot be reached and the cache does not know the revision.
    """
    identifier = hub_id(text)
    if identifier is None or identifier.is_pinned:
        return text
    return f"{identifier.repository}@{_small_files(identifier).name}"


def folder_of(text: str | Path) -> Path:
    """Return the local folder of a model or tokenizer: a path unchanged, a Hub id's folder in the
    cache.

    Downloads the id's files except for weights, unless they are in the cache. Raises `ConfigError`
    if that fails.
    """
    identifier = hub_id(text)
    return Path(text) if identifier is None else _small_files(identifier)


def folder_with_weights(text: str | Path, say: Say | None = None) -> Path:
    """Return the local folder of a model, as `folder_of` does, with its safetensors files.

    `say` receives a sentence with the size before a download. Raises `ConfigError` if the download
    fails, or if the repository has no safetensors files.
    """
    identifier = hub_id(text)
    if identifier is None:
        return Path(text)
    folder = _small_files(identifier)
    commit = HubId(identifier.repository, folder.name)
    names = _weight_files(folder)
    if all((folder / name).is_file() for name in names):
        return folder
    sizes = _sizes(commit)
    if not all(name in sizes for name in names):
        raise ConfigError(_no_safetensors(commit, names, list(sizes)))
    if say is not None:
        cached = sum(sizes[name] for name in names if (folder / name).is_file())
        total = sum(sizes[name] for name in names)
        say(
            f"downloading {commit}: {format_bytes(total)}, of which {format_bytes(cached)} are in "
            f"the cache {folder.parents[2]}"
        )
    return _snapshot(commit, names, is_quiet=say is None)


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files that a folder's model or adapters need."""
    if (folder / _INDEX).is_file():
        try:
            stated = json.loads(read_text(folder / _INDEX))["weight_map"].values()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder / _INDEX} is not an index of weights: {error}") from error
        return sorted({str(name) for name in stated})
    is_model = (folder / "config.json").is_file()
    return [_MODEL] if is_model else [_ADAPTERS]


def _small_files(identifier: HubId) -> Path:
    folder = _snapshot(identifier, _SMALL, is_quiet=True)
    if not folder.is_dir():
        known = "config.json, adapter_config.json or tokenizer.json"
        raise ConfigError(f"{identifier} is not a model or tokenizer that can be read: no {known}")
    return folder


def _snapshot(identifier: HubId, names: Sequence[str], *, is_quiet: bool) -> Path:
    """Return the id's folder in the cache, after downloading those of the named files that it
    lacks.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Quiet(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "disable": True})  # type: ignore[no-untyped-call]

    try:
        folder = snapshot_download(
            identifier.repository,
            revision=identifier.revision,
            allow_patterns=list(names),
            tqdm_class=Quiet if is_quiet else None,
        )
    except Exception as error:  # of HTTP, the network, the disk: the library raises all kinds
        raise ConfigError(_problem(identifier, error)) from error
    return Path(folder)


def _sizes(commit: HubId) -> dict[str, int]:
    """Return the size in bytes of each file of a commit, by name."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(commit.repository, revision=commit.revision, files_metadata=True)
    except Exception as error:  # as in `_snapshot`
        raise ConfigError(_problem(commit, error)) from error
    return {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}


def _no_safetensors(commit: HubId, names: Sequence[str], stored: Sequence[str]) -> str:
    missing = next(name for name in names if name not in stored)
    pickles = [name for name in stored if name.endswith((".bin", ".pt", ".pth"))]
    if not pickles:
        return f"{commit} has no {missing}"
    return (
        f"{commit} has no {missing}, only {pickles[0]}, a pickle, which could run any code when "
        "read. Convert it where you trust it: AutoModelForCausalLM.from_pretrained(ID)"
        ".save_pretrained(FOLDER) of transformers writes safetensors"
    )


def _problem(identifier: HubId, error: Exception) -> str:
    """Return the error message for a failed download, with what the user can do about it."""
    from huggingface_hub import constants, errors

    name = identifier.repository
    page = f"{constants.ENDPOINT}/{name}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name} is gated: accept its conditions at {page}, and set HF_TOKEN to a token of "
            "yours that may read it"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {identifier.revision!r}; {page}/commits lists them"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder {name} here, and {constants.ENDPOINT} shows no such repository: "
            "check the name. For a private one, set HF_TOKEN to a token that may read it"
        )
    preset, revision = preset_of(name), "" if identifier.revision == "main" else identifier.revision
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    known = f". model.preset={preset} has its sizes, without weights" if preset else ""
    reason = (
        "HF_HUB_OFFLINE is set"
        if constants.HF_HUB_OFFLINE
        else f"{constants.ENDPOINT} cannot be read: {str(error).splitlines()[0][:200]}"
    )
    return (
        f"there is no folder {name} here, the cache {constants.HF_HUB_CACHE} lacks files of "
        f"{identifier}, and {reason}. Where there is a network, {command} fills the cache, which "
        f"HF_HOME moves{known}"
    )
