"""Prepared stores in an object store, read by blocks through a bounded cache on this machine.

The manifest and the small files are copied whole. Of token ids and loss masks, the blocks of a MiB
that rows need are read, compared with their checksums, and kept on the disk for all ranks of the
machine and for later runs. What was not used for the longest time is removed first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.data.sampler import ReadRows, Rows
from meshwright.data.store import MANIFEST, FileRecord, Store, open_store, read_manifest
from meshwright.data.view import DamagedData
from meshwright.errors import DataError, MeshwrightError, refusal
from meshwright.files import BLOCK_BYTES, hash_file, sha256_bytes, writable_folder, write_atomic
from meshwright.store import StoreError, StorePath

AHEAD: Final = 8  # steps whose rows are read while others are trained on, each by a thread
_IN_MEMORY: Final = 32  # blocks that a process keeps besides those on the disk
# A process measures the cache each time it has added this share of its limit; eight processes
# together then stay within the limit if each begins to remove at seven eighths.
_MEASURED: Final = 64
_FULL: Final = 7 / 8
_LEFT: Final = 3 / 4


class BlockCache:
    """Blocks in a folder that processes share: at most `limit` bytes with up to eight of them.

    A block is a file that appears whole. A cache that cannot be written keeps nothing.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._added = limit  # by this process since it last measured the folder
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def block(self, name: str, fetch: Callable[[], bytes], is_good: Callable[[bytes], bool]) -> Any:
        """Return a block's bytes: from memory, from the disk if they are good, else as fetched.

        `fetch` returns good bytes or raises.
        """
        with self._lock:
            if (content := self._recent.get(name)) is not None:
                self._recent.move_to_end(name)
                return content
        stored = self._read(name)
        content = stored if stored is not None and is_good(stored) else fetch()
        if content is not stored:
            self._keep(name, content)
        with self._lock:
            self._recent[name] = content
            while len(self._recent) > _IN_MEMORY:
                self._recent.popitem(last=False)
        return content

    def _read(self, name: str) -> bytes | None:
        path = self._folder / name
        try:
            content = path.read_bytes()
            os.utime(path)  # by which the oldest are known
        except OSError:
            return None
        return content

    def _keep(self, name: str, content: bytes) -> None:
        """Write a block; without waiting for the disk, since a cut block is fetched again."""
        with self._lock:
            self._added += len(content)
            is_due = self._added > self._limit // _MEASURED
            self._added = 0 if is_due else self._added
        temporary = self._folder / f".{name}.tmp-{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            if is_due:
                self._remove_oldest()
            if len(content) <= self._limit // 8:
                temporary.write_bytes(content)
                temporary.replace(self._folder / name)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)

    def _remove_oldest(self) -> None:
        """Remove the blocks that were unused for longest, if the cache is nearly full."""
        entries = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                stat = path.stat()
                entries.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in entries)
        if total <= self._limit * _FULL:
            return
        for _, size, path in sorted(entries):
            if total <= self._limit * _LEFT:
                break
            path.unlink(missing_ok=True)
            total -= size


class RemoteItems:
    """The numbers of a file in an object store, read as slices; see `Items`."""

    def __init__(self, file: StorePath, record: FileRecord, dtype: str, cache: BlockCache) -> None:
        self._file, self._record, self._cache = file, record, cache
        self._dtype = np.dtype(dtype)

    def __len__(self) -> int:
        return self._record.bytes // self._dtype.itemsize

    def __getitem__(self, part: slice, /) -> NDArray[Any]:
        """Return the items of a slice, from verified blocks.

        Raises DamagedData if a block differs from its checksum, and `MeshwrightError` if the
        object store does not answer, after which ranks are restarted.
        """
        start, stop, _ = part.indices(len(self))
        if stop <= start:
            return np.empty(0, dtype=self._dtype)
        low, high = start * self._dtype.itemsize, stop * self._dtype.itemsize
        first, last = low // BLOCK_BYTES, (high - 1) // BLOCK_BYTES
        content = b"".join(self._block(number) for number in range(first, last + 1))
        return np.frombuffer(
            content, dtype=self._dtype, count=stop - start, offset=low - first * BLOCK_BYTES
        )

    def _block(self, number: int) -> bytes:
        checksum = self._record.blocks[number]
        content: bytes = self._cache.block(
            f"{self._record.sha256[:32]}-{number}",
            lambda: self._fetched(number),
            lambda content: zlib.crc32(content) == checksum,
        )
        return content

    def _fetched(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self._record.bytes)
        for _ in range(2):  # what was damaged on the way is right the second time
            try:
                content = self._file.read(start, stop)
            except FileNotFoundError:
                raise DamagedData(f"{self._file} is missing") from None
            except StoreError as error:
                raise MeshwrightError(f"data cannot be read: {error}") from error
            if zlib.crc32(content) == self._record.blocks[number]:
                return content
        raise DamagedData(
            f"{self._file} is damaged within bytes {start}-{stop - 1}: its checksum differs. "
            "Copy the file there again"
        )


class _Remote:
    """The large files of a store, which stay in the object store."""

    def __init__(self, root: StorePath, cache: BlockCache) -> None:
        self.root, self._cache = root, cache
        self._sizes = root.files()

    def problem(self, record: FileRecord) -> str | None:
        """Return what is wrong with the size of a file, or None."""
        file_bytes = self._sizes.get(record.file)
        if file_bytes is None:
            return f"{record.file} is missing"
        if file_bytes != record.bytes:
            return f"{record.file} has {file_bytes} bytes, should be {record.bytes}"
        if len(record.blocks) != -(-record.bytes // BLOCK_BYTES):
            return f"{record.file} has no checksums of blocks: an older version prepared it"
        return None

    def items(self, record: FileRecord, dtype: str) -> RemoteItems:
        """Return the numbers of a file."""
        return RemoteItems(self.root / record.file, record, dtype, self._cache)


def open_remote(root: StorePath, cache: Path, limit: int) -> Store:
    """Open the indexed store in a folder of an object store.

    Its small files are copied into `cache`, where also up to `limit` bytes of blocks are kept.
    Raises DataError as `open_store` does, and if the object store does not answer.
    """
    blocks = writable_folder(cache / "blocks")
    try:
        content = _manifest_of(root)
        folder = writable_folder(cache / "remote" / sha256_bytes(content)[:24])
        write_atomic(folder / MANIFEST, content)
        remote = _Remote(root, BlockCache(blocks, limit))
        manifest = read_manifest(folder)
        large = {file.file for shard in manifest.shards for file in shard.items_files()}
        for record in manifest.files():
            path = folder / record.file
            if record.file in large or (path.is_file() and _is_whole(path, record)):
                continue
            write_atomic(path, (root / record.file).read())
            if not _is_whole(path, record):
                raise DataError(f"{root / record.file} is damaged: its SHA-256 differs")
        return open_store(folder, remote)
    except FileNotFoundError as error:
        raise DataError(f"the store {root} lacks {error}") from None
    except StoreError as error:
        raise DataError(f"the store {root} cannot be read: {error}") from error


def _manifest_of(root: StorePath) -> bytes:
    try:
        return (root / MANIFEST).read()
    except FileNotFoundError:
        rule = f"{root} is not an indexed store: it has no {MANIFEST}"
        hint = (
            "Prepare one with `meshwright data prepare FOLDER --source ...`, and copy the folder "
            "there with the object store's own tool"
        )
        raise DataError(refusal(rule, hint=hint)) from None


def _is_whole(path: Path, record: FileRecord) -> bool:
    return hash_file(path).sha256 == record.sha256


class RowsAhead:
    """Reads the rows of a sampler's next steps in threads while others are trained on.

    Called like `Sampler.rows`, each time for the next step and the same rows. Nothing is read of
    step `stop` and later.
    """

    def __init__(self, rows: ReadRows, stop: int) -> None:
        self._rows, self._stop = rows, stop
        self._pool = ThreadPoolExecutor(AHEAD, "data")
        self._begun: dict[int, Future[Rows]] = {}

    def __call__(self, step: int, rows: range) -> Rows:
        """Return rows of the global batch of a step; raises as `Sampler.rows` does."""
        for later in range(step, min(step + AHEAD, self._stop)):
            if later not in self._begun:
                self._begun[later] = self._pool.submit(self._rows, later, rows)
        return self._begun.pop(step).result()
