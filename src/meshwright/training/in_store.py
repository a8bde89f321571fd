"""Runs whose steps are in an object store: their files beside the steps, and copies of them here.

No torch here.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Final

from meshwright.checkpoint.commit import (
    MANIFEST,
    files_of,
    manifest_text,
    read_manifest,
    steps,
    verify,
)
from meshwright.checkpoint.draft import Draft
from meshwright.errors import CheckpointError, ConfigError
from meshwright.files import plain_name, read_bytes, write_atomic
from meshwright.parsing import parse_json, parse_toml
from meshwright.spec.dump import to_toml
from meshwright.spec.loading import load_config
from meshwright.spec.stored import BEST, CONFIG, PLAN, best_step
from meshwright.store import StorePath
from meshwright.training.run_folder import Job, read_job, unused_name

RUN_FILES: Final = "run"  # the folder of a run's files, beside its steps
_NAME: Final = "folder-name"  # the object there that has the name of the run folder
# What only the machine that trains has use for, or grows with each step.
_STAY: Final = ("lock", "events.jsonl", "ledger.json")


def check_store(root: StorePath) -> None:
    """Refuse a store into which no object can be written, with the store's own reason."""
    probe = root / f".probe-{uuid.uuid4().hex[:8]}"
    try:
        probe.create(b"meshwright")
        probe.remove()
    except OSError as error:
        raise ConfigError(f"checkpoint.dir = {root} cannot be written: {error}") from None


def publish(job: Job) -> None:
    """Put the files that a resume needs beside a run's steps, if these are in a store.

    The plan comes last, and without it there is no run. Raises `StoreError`.
    """
    root = job.checkpoints
    if not isinstance(root, StorePath):
        return
    folder = job.folder.path
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for name in sorted(names, key=lambda name: name == PLAN):
        if plain_name(name) and name not in _STAY:
            (root / RUN_FILES / name).write_bytes(read_bytes(folder / name))
    (root / RUN_FILES / _NAME).write_text(folder.name)


def folder_of(root: StorePath, log_dir: str | None = None) -> Path:
    """Return the folder on this machine of the run that saves its steps in `root`.

    It is made from the files there if it is missing, in `log_dir`, by default the run's own.
    Raises `ConfigError` if there is no run.
    """
    contents = _run_files(root)
    if PLAN not in contents or CONFIG not in contents:
        raise ConfigError(f"--resume {root}: not a run, {root / RUN_FILES / PLAN} is missing")
    try:
        run = parse_json(contents[PLAN])["run"]
        stored_dir = parse_toml(contents[CONFIG].decode())["log"]["dir"]
        name = contents.get(_NAME, root.name.encode()).decode()
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--resume {root}: {root / RUN_FILES} is damaged: {error}") from error
    if not plain_name(name):
        raise ConfigError(f"--resume {root}: {name!r} is not a plain folder name")
    parent = Path(log_dir or stored_dir)
    folder = parent / name
    if (folder / PLAN).is_file():
        if read_job(folder).run == run:
            return folder
        folder = parent / unused_name(parent, name)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(contents, key=lambda file: file == PLAN):
        if file != _NAME:
            write_atomic(folder / file, contents[file])
    return folder


def _run_files(root: StorePath) -> dict[str, bytes]:
    """Return the contents of a run's files beside its steps, by name."""
    folder = root / RUN_FILES
    return {name: read_bytes(folder / name) for name in folder.files() if plain_name(name)}


def fetch(source: StorePath, out: Path) -> Path:
    """Copy a step, verified, into the new folder `out`, which every command opens as a run.

    `source` is a step, or a run, of which it is the newest, or with `/best` the best. Raises
    `CheckpointError` naming the object that is missing or corrupt.
    """
    step = _step(source)
    manifest = read_manifest(step)
    with Draft(out) as draft:
        folder = draft.path / "checkpoints" / step.name
        folder.mkdir(parents=True)
        for name in manifest["files"]:
            with (folder / name).open("xb") as file:
                for piece in (files_of(step, manifest) / name).pieces():
                    file.write(piece)
        local = {key: value for key, value in manifest.items() if key != "attempt"}
        (folder / MANIFEST).write_text(manifest_text(local), encoding="utf-8")
        verify(folder)
        for name, content in _run_files(step.parent).items():
            if name != _NAME:
                write_atomic(draft.path / name, content)
        config = draft.path / CONFIG
        if config.is_file():  # its steps are here
            fetched = load_config(config)
            checkpoint = fetched.checkpoint.model_copy(update={"dir": None})
            text = to_toml(fetched.model_copy(update={"checkpoint": checkpoint}))
            write_atomic(config, text.encode())
        draft.publish()
    return out


def _step(source: StorePath) -> StorePath:
    """Return the step that a URL names."""
    if (source / MANIFEST).is_file():
        return source
    if source.name == BEST:
        step = best_step(source.parent)
    else:
        step = next(iter(steps(source)[-1:]), None)
    if step is None:
        raise CheckpointError(f"{source} holds no committed step")
    return step
