"""`StorePath`: a folder or an object of an object store, through fsspec.

It has what steps need of `pathlib.Path`. Object stores have no rename and no folders, but an object
appears whole or not at all, and can be created on condition that there is none of its name.
Credentials come from the environment that the store's own library reads, and from nowhere else.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from meshwright.errors import CheckpointError, ConfigError, refusal
from meshwright.units import MIB

# The scheme of a URL, and what brings its file system; `file` and `memory` are fsspec's own.
PACKAGES: Final = {
    "s3": ("s3fs", 'pip install "meshwright[s3]"'),
    "gs": ("gcsfs", 'pip install "meshwright[gs]"'),
    "abfs": ("adlfs", 'pip install "meshwright[abfs]"'),
    "hf": ("huggingface_hub", 'pip install "meshwright[hf]"'),
    "file": ("fsspec", "pip install fsspec"),
    "memory": ("fsspec", "pip install fsspec"),
}
# Of an upload in parts, the bytes of a part, of which so many are sent beside each other.
PART: Final = 32 * MIB
_SENT: Final = 4
# S3 takes no more parts: an object of more bytes has larger ones.
_PARTS: Final = 10_000
# The bytes of a request that reads, of which so many are made beside each other.
PIECE: Final = 8 * MIB
REQUESTS: Final = 8
# Seconds before each further attempt, about, after those that the library makes itself.
PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
# What another attempt cannot mend.
_FINAL: Final = (PermissionError, ImportError, TypeError, ValueError, LookupError)

T = TypeVar("T")
A = TypeVar("A")


class StoreError(CheckpointError, OSError):
    """A store that does not answer, or refuses: nothing is known of what it holds."""


class Stat(NamedTuple):
    """The size of an object in bytes, as `os.stat` names it."""

    st_size: int


@dataclass(frozen=True, order=True)
class StorePath:
    """A URL without a slash at its end, as a path; `key` is all behind `scheme://`."""

    scheme: str
    key: str

    @classmethod
    def parse(cls, url: str) -> StorePath:
        """Return the path of a URL.

        Raises `ConfigError` if it has credentials in it, which the error does not repeat, or is of
        no known store.
        """
        scheme, _, rest = url.partition("://")
        if scheme not in PACKAGES:
            legal = [f"{known}://" for known in PACKAGES if known not in ("file", "memory")]
            raise ConfigError(refusal(f"{scheme}:// is not a known object store", legal=legal))
        user, at, _ = rest.partition("/")[0].rpartition("@")
        if (at and (":" in user or scheme in ("s3", "gs"))) or "?" in rest:
            raise ConfigError(
                f"a {scheme}:// URL with credentials in it is refused, since it would be written "
                "into the run: give them in the environment that the store's library reads, such "
                "as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        key = rest.rstrip("/")
        if not key or ".." in key.split("/"):
            raise ConfigError(f"{scheme}://{rest} names no folder: {scheme}://BUCKET/RUN does")
        return cls(scheme, key)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self.scheme, f"{self.key}/{name}") if name else self

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """All but the last part."""
        return StorePath(self.scheme, self.key.rpartition("/")[0])

    def resolve(self) -> StorePath:
        """Return the path itself: stores have no links."""
        return self

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder is there with the first object in it."""

    def files(self) -> dict[str, int]:
        """Return the objects in a folder and its folders: names relative to it, and bytes."""

        def listed() -> dict[str, int]:
            found = self._system.find(self.key, detail=True)
            names = {str(name): int(entry["size"] or 0) for name, entry in found.items()}
            start = f"{self._system._strip_protocol(str(self))}/"
            return {
                name[len(start) :]: size for name, size in names.items() if name.startswith(start)
            }

        return self._attempt(listed)

    def iterdir(self) -> Iterator[StorePath]:
        """Yield the objects and folders in a folder."""
        for name in dict.fromkeys(name.partition("/")[0] for name in self.files()):
            yield self / name

    def exists(self) -> bool:
        """Whether there is an object of this name, or one in this folder."""
        return self.is_file() or self.is_dir()

    def is_dir(self) -> bool:
        """Whether there is an object in this folder."""
        return bool(self.files())

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        try:
            return bool(self._attempt(lambda: self._system.info(self.key))["type"] == "file")
        except FileNotFoundError:
            return False

    def is_symlink(self) -> bool:
        """Return False: stores have no links."""
        return False

    def stat(self) -> Stat:
        """Return the size of an object."""
        return Stat(int(self._attempt(lambda: self._system.info(self.key))["size"]))

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes of an object, or a range of them, by one request."""
        if stop is not None and stop <= start:
            return b""
        data = self._attempt(lambda: self._system.cat_file(self.key, start=start, end=stop))
        return bytes(data)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of an object in order, some pieces at a time read beside each other."""
        spans = ByteRange(self, 0, self.stat().st_size).cut(PIECE)
        yield from beside(ByteRange.read, spans)

    def write_bytes(self, data: bytes) -> None:
        """Write an object, in place of one of the same name."""
        self._attempt(lambda: self._system.pipe_file(self.key, data))

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Write an object, in place of one of the same name."""
        self.write_bytes(text.encode(encoding))

    def create(self, data: bytes) -> None:
        """Write an object; raises `FileExistsError` if there is one of its name.

        Of several writers one succeeds, where the store knows conditional writes (S3's, Google's
        and Azure's do). A repeated attempt whose first has succeeded unheard is not a second
        writer.
        """
        try:
            self._attempt(lambda: self._system.pipe_file(self.key, data, mode="create"))
        except FileExistsError:
            if self.read() != data:
                raise

    def upload(self, write: Callable[[Any], T], size: int = 0) -> T:
        """Write an object of about `size` bytes by calling `write` with a file.

        Its parts are sent while it is written: to S3 beside each other, each again after a fault
        that may pass; elsewhere by the library, all of them again. An upload that fails leaves no
        object.
        """

        def once() -> T:
            if self.scheme == "s3":
                file: Any = _S3Upload(self, max(PART, -(-size // _PARTS)))
            else:
                file = self._system.open(self.key, "wb", block_size=PART)
            try:
                written = write(file)
                file.close()
            except BaseException:
                _discard(file)
                raise
            return written

        return once() if self.scheme == "s3" else self._attempt(once)

    def unlink(self) -> None:
        """Remove an object; nothing if there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._attempt(lambda: self._system.rm_file(self.key))

    def remove(self) -> None:
        """Remove an object, or a folder with all objects in it; nothing if there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._attempt(lambda: self._system.rm(self.key, recursive=True))

    @property
    def _system(self) -> Any:
        """The file system, which fsspec keeps; raises `ConfigError` if its package is missing."""
        package, install = PACKAGES[self.scheme]
        try:
            import fsspec

            # No listing is kept: other ranks write as well.
            options = {"auto_mkdir": True} if self.scheme == "file" else {}
            return fsspec.filesystem(self.scheme, use_listings_cache=False, **options)
        except ImportError:
            raise ConfigError(f"{self} needs {package}, not installed here: {install}") from None

    def _attempt(self, action: Callable[[], T]) -> T:
        """Return what `action` returns, after further attempts where a fault may pass.

        Raises `StoreError` without the library's own error, which may hold signed URLs.
        """
        for pause_s in (*PAUSES_S, None):
            try:
                return action()
            except (FileNotFoundError, FileExistsError, ConfigError):
                raise
            except Exception as error:
                is_final = isinstance(error, _FINAL) or "Credentials" in type(error).__name__
                if pause_s is None or is_final:
                    raise StoreError(f"{self}: {_words(error)}") from None
            time.sleep(pause_s * random.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")


class ByteRange(NamedTuple):
    """The bytes of an object from `start` to before `stop`."""

    path: StorePath
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.stop - self.start

    def cut(self, size: int) -> list[ByteRange]:
        """Return it as spans of `size` bytes, the last of which may be shorter."""
        starts = range(self.start, self.stop, size)
        return [ByteRange(self.path, start, min(self.stop, start + size)) for start in starts]

    def read(self) -> bytes:
        """Return its bytes."""
        return self.path.read(self.start, self.stop)


def beside(work: Callable[[A], T], items: Iterable[A]) -> Iterator[T]:
    """Yield what `work` returns of each item, in order; it does some items beside each other."""
    with ThreadPoolExecutor(REQUESTS, "store") as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) == REQUESTS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class _S3Upload:
    """A file that is written to S3 as parts of one size, or by one request if it is smaller.

    s3fs's own sends one part after another. At most `_SENT` parts are in memory besides the one
    that is written. `close` makes the object.
    """

    def __init__(self, path: StorePath, part: int) -> None:
        self._path, self._part = path, part
        self._bucket, _, self._key = path.key.partition("/")
        self._buffer, self._written = bytearray(), 0
        self._upload = ""  # its id, once there is more than one part
        self._pool = ThreadPoolExecutor(_SENT, "part")
        self._sent: list[Future[str]] = []
        self.closed = False

    def write(self, data: Any) -> int:
        """Take bytes, and send the parts that are full."""
        view = memoryview(data)
        self._written += len(view)
        for start in range(0, len(view), self._part):
            self._buffer += view[start : start + self._part]
            while len(self._buffer) > self._part:
                part = bytes(memoryview(self._buffer)[: self._part])
                del self._buffer[: self._part]
                self._send(part)
        return len(view)

    def close(self) -> None:
        """Send the last part, and make the object of all of them."""
        if not self._upload:
            self._path.write_bytes(bytes(self._buffer))
        else:
            self._send(bytes(self._buffer))
            self._complete()
        self._pool.shutdown()
        self.closed = True

    def discard(self) -> None:
        """Give the upload up, with the parts that were sent."""
        self._pool.shutdown(cancel_futures=True)
        if self._upload:
            self._call("abort_multipart_upload", UploadId=self._upload)

    def _send(self, part: bytes) -> None:
        """Begin to send a part, once no more than `_SENT` are on their way."""
        if not self._upload:
            self._upload = self._call("create_multipart_upload")["UploadId"]
        number = len(self._sent) + 1
        if number > _SENT:
            self._sent[-_SENT].result()
        options = {"UploadId": self._upload, "PartNumber": number, "Body": part}
        self._sent.append(
            self._pool.submit(lambda: str(self._call("upload_part", **options)["ETag"]))
        )

    def _complete(self) -> None:
        """Make the object of the parts; an answer that is lost fails no upload that was done."""
        tags = [future.result() for future in self._sent]
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        options = {"UploadId": self._upload, "MultipartUpload": {"Parts": parts}}
        try:
            self._call("complete_multipart_upload", **options)
        except OSError:  # asked again, S3 knows no such upload any more
            if not self._path.is_file() or self._path.stat().st_size != self._written:
                raise

    def _call(self, request: str, **options: Any) -> Any:
        system = self._path._system
        return self._path._attempt(
            lambda: system.call_s3(request, Bucket=self._bucket, Key=self._key, **options)
        )


def _discard(file: Any) -> None:
    """Give an upload up, so that closing the file does not complete it."""
    from fsspec.spec import AbstractBufferedFile

    # The store cleans up what is left of it later: that is not an object.
    with contextlib.suppress(Exception):
        if isinstance(file, _S3Upload | AbstractBufferedFile):
            file.closed = True
            file.discard()
        else:
            file.close()


def _words(error: BaseException) -> str:
    """Return an error of a library in one line, without the signatures of URLs."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"(\w+://[^\s?]+)\?\S*", r"\1", text)[:500]


def is_url(text: object) -> bool:
    """Whether a folder is named by a URL."""
    return isinstance(text, str) and re.match(r"[a-z][a-z0-9+.-]*://", text) is not None


# A folder or a file of a disk, or of a store.
Place = Path | StorePath


def place(text: str | Path) -> Place:
    """Return a path, or that of a URL; raises `ConfigError` as `StorePath.parse`."""
    return StorePath.parse(text) if isinstance(text, str) and is_url(text) else Path(text)
