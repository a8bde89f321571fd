"""The commit protocol: a step folder appears whole or not at all, and is verified when read.

Unique temporary folder, every file synced, the manifest with size and SHA-256 of each file written
last, folder synced, renamed, then `latest` replaced. A committed step is never written again. No
torch here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"


def step_name(step: int) -> str:
    """Return the folder name of a step."""
    return f"step-{step:08d}"


def commit(root: Path, step: int, write: Callable[[Path], None], facts: Mapping[str, Any]) -> Path:
    """Write a step folder under `root` by the protocol and return its path.

    `write` puts the files into the folder it is given; `facts` go into the manifest. A step that
    is already committed is left as it is. Raises `CheckpointError` with path and cause when the
    disk refuses; the older steps stay.
    """
    final = root / step_name(step)
    if final.exists():
        return final
    temporary = root / f".tmp-{step_name(step)}-{uuid.uuid4().hex[:8]}"
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        files = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
        manifest = {"format": FORMAT, "step": step, **facts, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        temporary.rename(final)
        sync(root)
        _point_latest(root, final.name)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"step {step} was not saved: {error.strerror} ({error.filename or temporary}); "
            "the steps before it are untouched"
        ) from error
    return final


def verify(folder: Path) -> dict[str, Any]:
    """Return the manifest of a step folder after checking size and SHA-256 of each of its files.

    Raises `CheckpointError` naming the file that is missing, truncated or changed.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is missing or unreadable: not a committed step") from error
    for name, expected in files.items():
        if Path(name).name != name:
            raise CheckpointError(f"{path} names {name!r}, which is not a plain file name")
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        found = _fingerprint(file)
        for fact in ("bytes", "sha256"):
            if found[fact] != expected.get(fact):
                raise CheckpointError(
                    f"{file} is corrupt: {fact} is {found[fact]}, the manifest says "
                    f"{expected.get(fact)}"
                )
    return dict(manifest)


def steps(root: Path) -> list[Path]:
    """Return the committed step folders, oldest first."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if re.fullmatch(r"step-\d{8,}", p.name) and p.is_dir())


def prune(root: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` steps, once the newest has been verified."""
    committed = steps(root)
    old = committed[:-keep]
    if old:
        verify(committed[-1])
    for path in old:
        shutil.rmtree(path)
    return old


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point_latest(root: Path, name: str) -> None:
    temporary = root / f".latest-{uuid.uuid4().hex[:8]}"
    temporary.write_text(name + "\n", encoding="utf-8")
    os.replace(temporary, root / "latest")
    with contextlib.suppress(OSError):  # some file systems refuse to sync a folder
        sync(root)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
