"""Files that are either whole or absent: atomic writing, hashing, and locks between processes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from meshwright.errors import ConfigError, DataError
from meshwright.store import Place, StorePath
from meshwright.units import MIB, format_bytes

# What a write that finds no room raises: on the disk, in a quota, in the limit of a process.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Configs, tokenizers, manifests and logs are smaller.
LARGEST_DOCUMENT = 256 * MIB
BLOCK_BYTES = MIB  # a damaged file is narrowed down to one block of this size
_TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{16}")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def plain_name(name: str) -> bool:
    """Return whether a name from a file is a plain file name, not a path."""
    return _PLAIN.fullmatch(name) is not None


def sha256_bytes(data: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


class FileHash:
    """SHA-256 of a file's bytes and the CRC-32 of each of its blocks, as the bytes arrive."""

    def __init__(self) -> None:
        self.size = 0
        self._sha = hashlib.sha256()
        self._blocks: list[int] = []
        self._crc = 0

    def update(self, data: bytes) -> None:
        """Add the next bytes."""
        view = memoryview(data)
        self._sha.update(view)
        while len(view):
            room = BLOCK_BYTES - self.size % BLOCK_BYTES
            self._crc = zlib.crc32(view[:room], self._crc)
            taken = min(room, len(view))
            self.size += taken
            view = view[taken:]
            if self.size % BLOCK_BYTES == 0:
                self._blocks.append(self._crc)
                self._crc = 0

    @property
    def sha256(self) -> str:
        """The hash of all bytes so far, in hex."""
        return self._sha.hexdigest()

    @property
    def blocks(self) -> tuple[int, ...]:
        """CRC-32 of each block of `BLOCK_BYTES`, the last one possibly shorter."""
        partial = (self._crc,) if self.size % BLOCK_BYTES else ()
        return (*self._blocks, *partial)


def hash_file(path: Path) -> FileHash:
    """Hash a file from the disk; DataError with the path if it cannot be read."""
    result = FileHash()
    with reading(path), path.open("rb") as file:
        while chunk := file.read(4 * MIB):
            result.update(chunk)
    return result


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert an operating-system error inside the block to a DataError with the path."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def read_bytes(path: Place, limit: int = LARGEST_DOCUMENT) -> bytes:
    """Return the bytes of a document, which may be a pipe, or an object of a store.

    Raises `OSError` if there are more than `limit`, so that /dev/zero cannot fill the memory.
    """
    if isinstance(path, StorePath):
        content = path.read(0, limit + 1)
    else:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(limit)}", str(path))
    return content


def read_text(path: Place, limit: int = LARGEST_DOCUMENT) -> str:
    """Return the UTF-8 text of a document, as `read_bytes`; raises `UnicodeDecodeError` too."""
    return read_bytes(path, limit).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


class AtomicFile:
    """A file that appears under its name only when it is complete and on the disk.

    Used as a context: an exception removes what was written. `hash` follows the bytes. With
    `private`, only its owner can read it. Raises DataError, with the path and the bytes written so
    far, if the disk refuses.
    """

    def __init__(self, path: Path, *, private: bool = False) -> None:
        self.path, self._mode = path, 0o600 if private else 0o666
        self.hash = FileHash()
        self._temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")

    def __enter__(self) -> AtomicFile:
        try:
            # O_EXCL never follows a link that someone put there.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._file = os.fdopen(os.open(self._temporary, flags, self._mode), "wb")
        except OSError as error:
            raise self._failed(error) from error
        return self

    def write(self, data: bytes) -> None:
        """Append bytes."""
        try:
            self._file.write(data)
        except OSError as error:
            raise self._failed(error) from error
        self.hash.update(data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                self._temporary.replace(self.path)
                sync_folder(self.path.parent)
        except OSError as error:
            if kind is None:
                raise self._failed(error) from error
        finally:
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> DataError:
        return DataError(
            f"cannot write {self.path} (after {self.hash.size} bytes): {error.strerror or error}"
        )


def write_atomic(path: Place, data: bytes, *, private: bool = False) -> None:
    """Write a whole small file atomically; with `private` its owner alone can read it."""
    if isinstance(path, StorePath):  # objects are whole by nature
        path.write_bytes(data)
        return
    with AtomicFile(path, private=private) as file:
        file.write(data)


def open_own(path: Path, flags: int) -> int:
    """Open a file in your own folder for writing, and return its descriptor.

    Raises `ConfigError` if it is a link, because its target may belong to anyone, and `OSError` as
    `os.open` does.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigError(f"{path} is a link, and nothing is written through it") from None


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder is full."""
    return os.statvfs(folder).f_bavail == 0


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if the file system supports it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def writable_folder(folder: Path) -> Path:
    """Create the folder if necessary and check that it is writable, else raise DataError."""
    probe = folder / f".probe.tmp-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise DataError(
            f"cannot write to the folder {folder}: {error.strerror or error}"
        ) from error
    return folder


def remove_temporaries(folder: Path) -> None:
    """Remove what a killed writer left; only the holder of the folder's lock may."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for one writer at a time; others wait, and a dead writer's lock is released.

    The lock file stays, because removing it would let two processes lock different files.
    """
    path = writable_folder(folder) / ".lock"
    try:
        handle = open_own(path, os.O_RDWR)
    except ConfigError as error:
        raise DataError(f"cannot lock {path.parent}: {error}") from error
    except OSError as error:
        raise DataError(f"cannot lock {path}: {error.strerror or error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
