"""The commit protocol: a step folder appears whole or not at all, and is verified when read.

On a disk: unique temporary folder, every file synced, the manifest with size and SHA-256 of each
file written last, folder synced, renamed, then `latest` replaced. An object store has no rename:
there, a step's files are in a folder of their own within the step's, and the step exists once its
manifest does, which names that folder and is created only if there is none. A committed step is
never written again, and its manifest names the run that wrote it. No torch here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from shlex import quote
from typing import Any, Final, NamedTuple, TypeVar, cast

from meshwright.errors import CheckpointError
from meshwright.files import read_bytes, read_text
from meshwright.parsing import parse_json
from meshwright.spec.stored import best_step
from meshwright.store import PIECE, ByteRange, Place, StoreError, StorePath, beside

FORMAT: Final = 2
MANIFEST: Final = "manifest.json"
LATEST: Final = "latest"
LOCK: Final = "lock"  # of the run that writes into the folder, as `runtime.supervise.lock` keeps it
# Where a save has got to: about to begin, half-way in a shard, about to write the manifest, to
# rename the folder, to change `latest`, to remove old steps.
PLACES: Final = ("begin", "shard", "manifest", "rename", "pointer", "purge")
Mark = Callable[[str], None]  # told of each
# In a store, of the manifest: the folder with the files of a step. On a disk they are beside it.
_ATTEMPT: Final = "attempt"
_ASIDE: Final = "bad-"  # what set-aside manifests and folders begin with
_STEP: Final = re.compile(r"step-\d{8,}")

P = TypeVar("P", bound=Place)


class Fingerprint(NamedTuple):
    """A file's size in bytes and its SHA-256 in hex."""

    bytes: int
    sha256: str


def step_name(step: int) -> str:
    """Return the folder name of a step."""
    return f"step-{step:08d}"


def unmarked(moment: str) -> None:
    """Do nothing: the default for `mark`, which gets the progress of a save."""


def begin(root: P, step: int, run: str = "") -> P | None:
    """Return a new temporary folder for a step's files; None if `run` has committed the step.

    `root` must exist: if it is gone, someone removed it during the run. Raises `CheckpointError` if
    the folder or the step belongs to another run, and with path and cause for a disk error.
    """
    _refuse_others(root, _writers(root), run)
    final = root / step_name(step)
    if is_there(final):
        if run_of(final) == run:
            return None
        raise CheckpointError(
            f"{final} is there already, and this run did not write it: its own step {step} was not "
            "saved. Give each run a folder of its own (checkpoint.dir)"
        )
    unique = uuid.uuid4().hex[:8]
    if isinstance(final, StorePath):
        return cast(P, final / f"try-{unique}")
    temporary = root / f".tmp-{step_name(step)}-{unique}"
    with _told(temporary):
        temporary.mkdir()
    return cast(P, temporary)


def is_there(folder: Place) -> bool:
    """Whether a step folder exists: in a store, whether its manifest does."""
    return (folder / MANIFEST).is_file() if isinstance(folder, StorePath) else folder.exists()


def claim(root: Place, run: str) -> str:
    """Make this process the only writer under `root` of a store, and return its random id.

    It removes what interrupted saves have left. A process that claimed `root` before can commit no
    further step. On a disk, which has locks, nothing happens. Raises `CheckpointError` if another
    run has written steps there.
    """
    if not isinstance(root, StorePath):
        return ""
    _refuse_others(root, _newest_writer(root), run)
    writer = uuid.uuid4().hex
    (root / LOCK).write_text(json.dumps({"run": run, "writer": writer}))
    clean(root)
    return writer


def run_of(folder: Place) -> str:
    """Return the id of the run that wrote a step; empty if its manifest has none."""
    try:
        return str(read_manifest(folder).get("run", ""))
    except StoreError:
        raise
    except CheckpointError:
        return ""


def _newest_writer(root: Place) -> list[tuple[str, str]]:
    """Return the run that wrote the newest step, if there is one, and what it did."""
    return [(run_of(path), f"written {path.name}") for path in steps(root)[-1:]]


def _writers(root: Place) -> list[tuple[str, str]]:
    """Return the runs that write under `root`, or have written there, and what they did."""
    writers = []
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody has it locked
        writers.append((_holder(root).get("run", ""), "locked it"))
    return writers + _newest_writer(root)


def _holder(root: Place) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], parse_json(read_text(root / LOCK)))


def _refuse_others(root: Place, writers: Iterable[tuple[str, str]], run: str) -> None:
    """Raise `CheckpointError` where one of the writers is another run."""
    for writer, action in writers:
        if writer and writer != run:
            raise CheckpointError(
                f"{root} is another run's by now: run {writer} has {action}, and this is "
                f"{f'run {run}' if run else 'a run without an id'}. Nothing was saved there; give "
                "each run a folder of its own (checkpoint.dir)"
            )


def _write_texts(folder: Place, texts: Mapping[str, str]) -> dict[str, Fingerprint]:
    """Write files of a step, synced, or as objects beside each other; return size and hash."""
    contents = {name: text.encode() for name, text in texts.items()}

    def write(name: str) -> Fingerprint:
        (folder / name).write_bytes(contents[name])
        sync(folder / name)
        return Fingerprint(len(contents[name]), hashlib.sha256(contents[name]).hexdigest())

    in_store = isinstance(folder, StorePath)
    written: Iterable[Fingerprint] = beside(write, texts) if in_store else map(write, texts)
    return dict(zip(texts, written, strict=True))


def seal(
    temporary: P,
    step: int,
    files: Mapping[str, Fingerprint],
    facts: Mapping[str, Any],
    mark: Mark = unmarked,
    writer: str = "",
    texts: Mapping[str, str] | None = None,
) -> P:
    """Write the manifest of a temporary folder, make the step appear, and return its path.

    `files` are already written and synced; `texts` are written here, and all other files are hashed
    and synced. `writer` is what `claim` returned. Raises `CheckpointError` with path and cause if
    the disk refuses; older steps stay.
    """
    with _told(temporary):
        fingerprints = {**files, **_write_texts(temporary, texts or {})}
        written: Iterable[Place] = temporary.iterdir()
        for path in sorted(written, key=str):
            if path.name not in fingerprints:
                sync(path)
                fingerprints[path.name] = fingerprint(path)
        mark("manifest")
        listed = {name: fingerprints[name]._asdict() for name in sorted(fingerprints)}
        manifest = {"format": FORMAT, "step": step, **facts, "files": listed}
        if isinstance(temporary, StorePath):
            manifest[_ATTEMPT] = temporary.name
            return cast(P, _commit_object(temporary, manifest, mark, writer))
        return cast(P, _commit_by_rename(temporary, manifest, mark))


def _commit_by_rename(temporary: Path, manifest: dict[str, Any], mark: Mark) -> Path:
    root = temporary.parent
    final = root / step_name(manifest["step"])
    (temporary / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
    sync(temporary / MANIFEST)
    sync(temporary)
    mark("rename")
    temporary.rename(final)
    sync(root)
    mark("pointer")
    point(root, LATEST, final.name)
    return final


def _commit_object(
    temporary: StorePath, manifest: dict[str, Any], mark: Mark, writer: str
) -> StorePath:
    """Create the manifest of a step, all of whose files are in the store."""
    final = temporary.parent
    root = final.parent
    refused = ""
    if writer and _holder(root).get("writer") != writer:
        refused = (
            f"another process has taken over {root}: {final.name} was not saved by this one, which "
            "was held up, or is a second one of the same run"
        )
    sizes = temporary.files()
    for name, expected in manifest["files"].items():
        if not refused and sizes.get(name) != expected["bytes"]:
            refused = (
                f"{temporary / name} was not saved: {expected['bytes']} bytes were sent, and the "
                f"store has {sizes.get(name, 'none')}"
            )
    mark("rename")
    try:
        if not refused:
            (final / MANIFEST).create(manifest_text(manifest).encode())
    except FileExistsError:
        refused = f"{final} was committed by another process meanwhile, and is kept as it is"
    if refused:
        temporary.remove()
        raise CheckpointError(refused)
    mark("pointer")
    point(root, LATEST, final.name)
    return final


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as the text of its file, with its digest."""
    return json.dumps({**manifest, "digest": _digest(manifest)}, indent=1) + "\n"


@contextlib.contextmanager
def _told(temporary: Place) -> Any:
    """Turn an error of the disk into one that names the path, and leave nothing half-done.

    What is in a store stays there if the store's answer is not known: it may have the manifest.
    """
    try:
        yield
    except OSError as error:
        if not isinstance(error, StoreError):
            with contextlib.suppress(OSError):
                remove(temporary)
        raise CheckpointError(
            f"{error.filename or temporary} was not written: {error.strerror or error}; "
            "the steps before it are untouched"
        ) from error


def read_manifest(folder: Place) -> dict[str, Any]:
    """Return the manifest of a step folder, whose digest shows that it is unchanged.

    Raises `CheckpointError` if it is missing, changed or of another format, and `StoreError` if a
    store does not answer.
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
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is missing or unreadable: not a committed step") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is of format {manifest.get('format')}; this version reads {FORMAT}"
        )
    if not is_whole:
        raise CheckpointError(f"{path} is corrupt: its digest is not that of its content")
    for name in (*files, *([manifest[_ATTEMPT]] if _ATTEMPT in manifest else [])):
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{path} names {name!r}, which is not a plain file name")
    return manifest


def files_of(folder: P, manifest: Mapping[str, Any]) -> P:
    """Return the folder with the files of a step, whose manifest is given."""
    return cast(P, folder / manifest.get(_ATTEMPT, ""))


def verify(folder: Place, only: Callable[[int], bool] = lambda index: True) -> dict[str, Any]:
    """Return the manifest of a step folder after checking size and SHA-256 of each of its files.

    `only` selects files by their index in the manifest, so that ranks can share the work. Raises
    `CheckpointError` naming the file that is missing, truncated or changed.
    """
    manifest = read_manifest(folder)
    files = files_of(folder, manifest)
    listed = list(manifest["files"].items())
    expected = {name: entry for index, (name, entry) in enumerate(listed) if only(index)}
    sizes = _sizes(files, expected)
    for name, entry in expected.items():
        if name not in sizes:
            raise CheckpointError(f"{files / name} is missing, or not a file")
        if sizes[name] != entry["bytes"]:
            raise CheckpointError(
                f"{files / name} is corrupt: it has {sizes[name]} bytes, the manifest says "
                f"{entry['bytes']}"
            )
    for name, sha256 in _hashes(files, sizes):
        if sha256 != expected[name]["sha256"]:
            raise CheckpointError(
                f"{files / name} is corrupt: its SHA-256 is not that of the manifest"
            )
    return manifest


def _sizes(folder: Place, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes in bytes of those of some files that there are; links are none."""
    if isinstance(folder, StorePath):
        listed = folder.files()
        return {name: listed[name] for name in names if name in listed}
    paths = ((name, folder / name) for name in names)
    return {n: path.stat().st_size for n, path in paths if path.is_file() and not path.is_symlink()}


def _hashes(folder: Place, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield files and their SHA-256 in hex; objects are read in pieces beside each other."""
    if not isinstance(folder, StorePath):
        yield from ((name, fingerprint(folder / name).sha256) for name in sizes)
        return
    pieces = {name: ByteRange(folder / name, 0, size).cut(PIECE) for name, size in sizes.items()}
    contents = beside(ByteRange.read, chain.from_iterable(pieces.values()))
    for name, spans in pieces.items():
        digest = hashlib.sha256()
        for content in islice(contents, len(spans)):
            digest.update(content)
        yield name, digest.hexdigest()


def steps(root: P) -> list[P]:
    """Return the committed step folders, oldest first."""
    if isinstance(root, StorePath):
        parts = (name.partition("/") for name in root.files())
        names = {step for step, _, inner in parts if _STEP.fullmatch(step) and inner == MANIFEST}
        return [cast(P, root / name) for name in sorted(names)]
    if not root.is_dir():
        return []
    folders = (p for p in root.iterdir() if _STEP.fullmatch(p.name) and p.is_dir())
    return [cast(P, path) for path in sorted(folders)]


def clean(root: P) -> list[P]:
    """Remove what interrupted saves have left; only the sole writer under `root` may call it."""
    if isinstance(root, StorePath):
        left: list[Place] = [*_uncommitted(root)]
    elif root.is_dir():
        left = [p for p in root.iterdir() if re.match(r"\.(tmp-step|latest|old-step)-", p.name)]
    else:
        left = []
    for path in left:
        with contextlib.suppress(OSError):
            remove(path)
    return cast(list[P], left)


def _uncommitted(root: StorePath) -> Iterator[StorePath]:
    """Yield the folders of files that no manifest names; not of steps that were set aside."""
    contents: dict[str, set[str]] = {}
    for name in root.files():
        step, _, inner = name.partition("/")
        if _STEP.fullmatch(step):
            contents.setdefault(step, set()).add(inner.partition("/")[0])
    for step, names in sorted(contents.items()):
        if any(name.startswith(_ASIDE) for name in names):
            continue
        if MANIFEST in names:
            try:
                names.discard(read_manifest(root / step).get(_ATTEMPT, ""))
            except CheckpointError:  # damaged: that step is for `newest_good` to judge
                continue
        yield from (root / step / name for name in sorted(names - {MANIFEST}))


def remove(path: Place) -> None:
    """Remove a file, a folder, or a link, of which what it leads to stays."""
    if isinstance(path, StorePath):
        path.remove()
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(folder: P) -> P:
    """Make a step that failed its verification none, so that it can be saved again; keep it."""
    unique = uuid.uuid4().hex[:8]
    if isinstance(folder, StorePath):
        aside: Place = folder / f"{_ASIDE}{MANIFEST}-{unique}"
        aside.write_bytes(read_bytes(folder / MANIFEST))
        remove(folder / MANIFEST)
    else:
        aside = folder.with_name(f"{_ASIDE}{folder.name}-{unique}")
        folder.rename(aside)
    return cast(P, aside)


def anew(root: Place) -> str:
    """Return what to do about a folder of steps none of which can be used."""
    return (
        "Restore the files; to start over, start a new run in another folder. A job that comes "
        f"back to this run by itself, as Kubernetes' and SkyPilot's do, starts over after you "
        f"move {root} away: mv {quote(str(root))} {quote(f'{root}-damaged')}"
    )


def prune(root: P, keep: int) -> list[P]:
    """Remove old steps once the newest has been verified, and return them."""
    if old_steps(root, keep):
        verify(steps(root)[-1])
    return purge(root, keep)


def old_steps(root: P, keep: int) -> list[P]:
    """Return all steps except the newest `keep` and the best one."""
    best = best_step(root)
    return [path for path in steps(root)[:-keep] if path != best]


def purge(root: P, keep: int) -> list[P]:
    """Remove old steps and return them; the newest of all must be verified."""
    old = old_steps(root, keep)
    for path in old:  # half of a step must not look like one
        if isinstance(path, StorePath):
            files = files_of(path, read_manifest(path))
            (path / MANIFEST).unlink()
            remove(files)
        else:
            gone = path.with_name(f".old-{path.name}-{uuid.uuid4().hex[:8]}")
            path.rename(gone)
            remove(gone)
    return old


def sync(path: Place) -> None:
    """Flush a file or folder to the disk; an object is in its store once it is written."""
    if isinstance(path, StorePath):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(path: Place) -> Fingerprint:
    """Return a file's size and hash, read from the disk or the store."""
    if isinstance(path, StorePath):
        size, sha256 = 0, hashlib.sha256()
        for piece in path.pieces():
            size += len(piece)
            sha256.update(piece)
        return Fingerprint(size, sha256.hexdigest())
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Fingerprint(path.stat().st_size, digest)


def digest_of(texts: Iterable[str]) -> str:
    """Return the SHA-256 in hex of texts joined by line feeds."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _digest(manifest: Mapping[str, Any]) -> str:
    return digest_of([json.dumps(manifest, sort_keys=True)])


def point(root: Place, pointer: str, name: str) -> None:
    """Set a pointer, `latest` or `best`, to a step folder."""
    if isinstance(root, StorePath):
        (root / pointer).write_text(name + "\n")
        return
    temporary = root / f".latest-{uuid.uuid4().hex[:8]}"
    temporary.write_text(name + "\n", encoding="utf-8")
    os.replace(temporary, root / pointer)
    with contextlib.suppress(OSError):  # some file systems refuse to sync a folder
        sync(root)
