"""The commit protocol: a step folder appears whole or not at all, and is verified when read.

Unique temporary folder, every file synced, the manifest with size and SHA-256 of each file written
last, folder synced, renamed, then `latest` replaced. A committed step is never written again, and
its manifest names the run that wrote it. No torch here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any, Final, NamedTuple

from meshwright.errors import CheckpointError
from meshwright.files import read_text
from meshwright.parsing import parse_json
from meshwright.spec.stored import best_step

FORMAT: Final = 2
MANIFEST: Final = "manifest.json"
LATEST: Final = "latest"
LOCK: Final = "lock"  # of the run that writes into the folder, as `runtime.supervise.lock` keeps it
# Where a save has got to: about to begin, half-way in a shard, about to write the manifest, to
# rename the folder, to change `latest`, to remove old steps.
PLACES: Final = ("begin", "shard", "manifest", "rename", "pointer", "purge")
Mark = Callable[[str], None]  # told of each


class Fingerprint(NamedTuple):
    """A file's size in bytes and its SHA-256 in hex."""

    bytes: int
    sha256: str


def step_name(step: int) -> str:
    """Return the folder name of a step."""
    return f"step-{step:08d}"


def unmarked(moment: str) -> None:
    """Do nothing: the default for `mark`, which gets the progress of a save."""


def begin(root: Path, step: int, run: str = "") -> Path | None:
    """Create a temporary folder for a step's files; return None if `run` has committed the step.

    `root` must exist: if it is gone, someone removed it during the run. Raises `CheckpointError` if
    the folder or the step belongs to another run, and with path and cause for a disk error.
    """
    _refuse_others(root, run)
    final = root / step_name(step)
    if final.exists():
        if run_of(final) == run:
            return None
        raise CheckpointError(
            f"{final} is there already, and this run did not write it: its own step {step} was not "
            "saved. Give each run a folder of its own (checkpoint.dir)"
        )
    temporary = root / f".tmp-{step_name(step)}-{uuid.uuid4().hex[:8]}"
    with _told(temporary):
        temporary.mkdir()
    return temporary


def run_of(folder: Path) -> str:
    """Return the id of the run that wrote a step; empty if its manifest has none."""
    try:
        return str(read_manifest(folder).get("run", ""))
    except CheckpointError:
        return ""


def _refuse_others(root: Path, run: str) -> None:
    """Raise `CheckpointError` where another run writes under `root`, or has written there."""
    writers = []
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody has it locked
        holder = parse_json(read_text(root / LOCK))
        writers.append((holder.get("run"), "locked it"))
    writers += [(run_of(path), f"written {path.name}") for path in steps(root)[-1:]]
    for writer, action in writers:
        if writer and writer != run:
            raise CheckpointError(
                f"{root} is another run's by now: run {writer} has {action}, and this is "
                f"{f'run {run}' if run else 'a run without an id'}. Nothing was saved there; give "
                "each run a folder of its own (checkpoint.dir)"
            )


def seal(
    temporary: Path,
    step: int,
    files: Mapping[str, Fingerprint],
    facts: Mapping[str, Any],
    mark: Mark = unmarked,
) -> Path:
    """Commit the step in a temporary folder: write its manifest, rename it, set `latest`.

    Returns the step's path. `files` are already written and synced; all others are hashed and
    synced here. `facts` go into the manifest. Raises `CheckpointError` with path and cause for a
    disk error; older steps stay.
    """
    root = temporary.parent
    final = root / step_name(step)
    with _told(temporary):
        fingerprints = dict(files)
        for path in sorted(temporary.iterdir()):
            if path.name not in fingerprints:
                sync(path)
                fingerprints[path.name] = fingerprint(path)
        mark("manifest")
        listed = {name: fingerprints[name]._asdict() for name in sorted(fingerprints)}
        manifest = {"format": FORMAT, "step": step, **facts, "files": listed}
        manifest["digest"] = _digest(manifest)
        text = json.dumps(manifest, indent=1) + "\n"
        (temporary / MANIFEST).write_text(text, encoding="utf-8")
        sync(temporary / MANIFEST)
        sync(temporary)
        mark("rename")
        temporary.rename(final)
        sync(root)
        mark("pointer")
        point(root, LATEST, final.name)
    return final


@contextlib.contextmanager
def _told(temporary: Path) -> Any:
    """Within this context, turn an `OSError` into a `CheckpointError`, and remove `temporary`."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{error.filename or temporary} was not written: {error.strerror}; "
            "the steps before it are untouched"
        ) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a step folder, after checking its digest.

    Raises `CheckpointError` if it is missing, changed or of another format.
    """
    path = folder / MANIFEST
    try:
        manifest = dict(parse_json(read_text(path)))
        digest = manifest.pop("digest", None)
        files = dict(manifest["files"])
        is_whole = digest == _digest(manifest) and all(
            isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)
            for entry in files.values()
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is missing or unreadable: not a committed step") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is of format {manifest.get('format')}; this version reads {FORMAT}"
        )
    if not is_whole:
        raise CheckpointError(f"{path} is corrupt: its digest is not that of its content")
    for name in files:
        if Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{path} names {name!r}, which is not a plain file name")
    return manifest


def verify(folder: Path, only: Callable[[int], bool] = lambda index: True) -> dict[str, Any]:
    """Check size and SHA-256 of each file of a step folder, and return its manifest.

    `only` selects files by their index in the manifest, so that ranks can share the work. Raises
    `CheckpointError` naming the file that is missing, truncated or changed.
    """
    manifest = read_manifest(folder)
    for index, (name, expected) in enumerate(manifest["files"].items()):
        if not only(index):
            continue
        file = folder / name
        if not file.is_file() or file.is_symlink():
            raise CheckpointError(f"{file} is missing, or not a file")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{file} is corrupt: it has {size} bytes, the manifest says {expected['bytes']}"
            )
        if fingerprint(file).sha256 != expected["sha256"]:
            raise CheckpointError(f"{file} is corrupt: its SHA-256 is not that of the manifest")
    return manifest


def steps(root: Path) -> list[Path]:
    """Return the committed step folders, oldest first."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if re.fullmatch(r"step-\d{8,}", p.name) and p.is_dir())


def clean(root: Path) -> list[Path]:
    """Remove and return the remains of interrupted saves; only the sole writer may call it."""
    if not root.is_dir():
        return []
    left = [p for p in root.iterdir() if re.match(r"\.(tmp-step|latest|old-step)-", p.name)]
    for path in left:
        with contextlib.suppress(OSError):
            _remove(path)
    return left


def _remove(path: Path) -> None:
    """Remove a file, a folder, or a symbolic link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(folder: Path) -> Path:
    """Rename a step that failed its verification, so that it can be saved again; return its
    path.
    """
    aside = folder.with_name(f"bad-{folder.name}-{uuid.uuid4().hex[:8]}")
    folder.rename(aside)
    return aside


def anew(root: Path) -> str:
    """Return advice for the user if no step under `root` is usable."""
    return (
        "Restore the files; to start over, start a new run in another folder. A job that comes "
        f"back to this run by itself, as Kubernetes' and SkyPilot's do, starts over after you "
        f"move {root} away: mv {quote(str(root))} {quote(f'{root}-damaged')}"
    )


def prune(root: Path, keep: int) -> list[Path]:
    """Verify the newest step, then remove and return all but the newest `keep` and the best."""
    if old_steps(root, keep):
        verify(steps(root)[-1])
    return purge(root, keep)


def old_steps(root: Path, keep: int) -> list[Path]:
    """Return all steps except the newest `keep` and the best one."""
    best = best_step(root)
    return [path for path in steps(root)[:-keep] if path != best]


def purge(root: Path, keep: int) -> list[Path]:
    """Remove and return all steps but the newest `keep` and the best, without verifying any.

    The caller must have verified the newest step.
    """
    old = old_steps(root, keep)
    for path in old:
        # Renamed first: half of a step must not look like one.
        gone = path.with_name(f".old-{path.name}-{uuid.uuid4().hex[:8]}")
        path.rename(gone)
        _remove(gone)
    return old


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(path: Path) -> Fingerprint:
    """Return a file's size and hash, read from the disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Fingerprint(path.stat().st_size, digest)


def digest_of(texts: Iterable[str]) -> str:
    """Return the SHA-256 in hex of texts joined by line feeds."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _digest(manifest: Mapping[str, Any]) -> str:
    return digest_of([json.dumps(manifest, sort_keys=True)])


def point(root: Path, pointer: str, name: str) -> None:
    """Make the pointer file `latest` or `best` name a step folder."""
    temporary = root / f".latest-{uuid.uuid4().hex[:8]}"
    temporary.write_text(name + "\n", encoding="utf-8")
    os.replace(temporary, root / pointer)
    with contextlib.suppress(OSError):  # some file systems refuse to sync a folder
        sync(root)
