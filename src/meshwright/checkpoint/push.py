"""Uploads a Hugging Face folder to the Hub as one commit. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshwright.errors import CheckpointError, ConfigError, refusal
from meshwright.spec.hub import repository_name

CARD: Final = "README.md"
# What an earlier push may have left under other names: a model in more files than this one.
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json")
_NO_RIGHT: Final = (401, 403)


@dataclass(frozen=True)
class Pushed:
    """A folder on the Hub: `commit` is the hash of its new commit, `url` its page.

    `files` has the size of each file in bytes. `kept_card`: the repository had a model card, which
    was not replaced.
    """

    repository: str
    url: str
    commit: str
    private: bool
    files: Mapping[str, int]
    kept_card: bool


def check_push(repository: str) -> None:
    """Raise `ConfigError` if a text does not name a repository, or if there is no token."""
    from huggingface_hub import constants, get_token

    repository_name(repository)
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set, and a push needs the network")
    if get_token() is None:
        rule = "a push needs a token, and there is none"
        hint = (
            f"Make one with write access at {constants.ENDPOINT}/settings/tokens, and set "
            "HF_TOKEN, or run `hf auth login`. `--dry-run` needs none"
        )
        raise ConfigError(refusal(rule, hint=hint))


def push(folder: Path, repository: str, *, public: bool, replace_card: bool) -> Pushed:
    """Upload the files of a folder to a repository, created if missing, as one commit.

    Weights that the repository has and the folder has not are removed in that commit. The Hub knows
    files by their hashes, so a repeated push sends only those that are missing. Raises
    `ConfigError` if an existing repository is public and `public` is false, and as `check_push`;
    `CheckpointError` if the upload fails.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    check_push(repository)
    hub = HfApi()
    try:
        try:
            existing = hub.model_info(repository)
        except RepositoryNotFoundError:
            hub.create_repo(repository, private=not public, exist_ok=True)
            existing = hub.model_info(repository)
        if not (existing.private or public):
            rule = f"{repository} is public, and a push is private unless asked"
            raise ConfigError(refusal(rule, legal=["--public"]))
        stored_names = {sibling.rfilename for sibling in existing.siblings or ()}
        kept_card = CARD in stored_names and not replace_card
        commit = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=f"Upload {folder.name}",
            ignore_patterns=[CARD] if kept_card else None,
            delete_patterns=list(_WEIGHTS),
        )
    except ConfigError:
        raise
    except Exception as error:  # of HTTP, the network, the disk: the library raises all kinds
        raise CheckpointError(_problem(repository, error)) from error
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not (kept_card and path == folder / CARD)
    }
    url = f"{hub.endpoint}/{repository}"
    return Pushed(repository, url, commit.oid, bool(existing.private), files, kept_card)


def _problem(repository: str, error: Exception) -> str:
    """Word a failed push, and what helps."""
    from huggingface_hub import constants

    response: Any = getattr(error, "response", None)
    if getattr(response, "status_code", None) in _NO_RIGHT:
        return (
            f"{constants.ENDPOINT} refused the token for {repository}: it needs write access to "
            f"{repository.partition('/')[0]}; {constants.ENDPOINT}/settings/tokens shows its rights"
        )
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return (
        f"{repository} was not updated: {reason}. Repeat the command: files that arrived are not "
        "sent again"
    )
