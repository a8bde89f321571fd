"""TinyStories, downloaded once from the Hugging Face hub and checked against its stated hash."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any

from meshwright.data.corpora import Files, Fingerprint, Skip, SourcePart
from meshwright.errors import DataError
from meshwright.files import AtomicFile, hash_file, locked, read_text, reading, write_atomic
from meshwright.parsing import parse_json
from meshwright.units import MIB, format_bytes

HUB = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main"
FILES = {"train": "TinyStoriesV2-GPT4-train.txt", "valid": "TinyStoriesV2-GPT4-valid.txt"}
TIMEOUT_S = 30.0
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TinyStories:
    """The GPT-4 stories (2.2 GB, or 22 MB for the part "valid"), kept in `folder`.

    The file is downloaded if it is missing; a file put there by hand is used as it is. Its SHA-256
    is recorded next to it and checked before it is read again.
    """

    folder: Path
    part: str = "train"
    base: str = HUB
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.part not in FILES:
            raise DataError(f"source = tinystories:{self.part}; the parts are {', '.join(FILES)}")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"progress": None}

    @property
    def path(self) -> Path:
        """Where the file is or will be."""
        return self.folder / FILES[self.part]

    @property
    def _record_path(self) -> Path:
        return self.path.with_name(self.path.name + ".json")

    def fingerprint(self) -> Fingerprint:
        """Return the recorded size and SHA-256, after a download where the file is missing."""
        with locked(self.folder):
            if not self.path.is_file():
                self._download()
            elif not self._record_path.is_file():
                file_hash = hash_file(self.path)
                self._record({"url": None, "size": file_hash.size, "sha256": file_hash.sha256})
            record = self._recorded()
        file_bytes = self.path.stat().st_size
        if file_bytes != record["size"]:
            raise self._damaged(f"{file_bytes} bytes, recorded {record['size']}")
        return {"kind": "tinystories", "part": self.part, **record}

    def parts(self) -> list[SourcePart]:
        """Return byte ranges of the file, after its hash has been checked."""
        record = self.fingerprint()
        sha256 = hash_file(self.path).sha256
        if sha256 != record["sha256"]:
            raise self._damaged(f"SHA-256 {sha256}, recorded {record['sha256']}")
        return self._files.parts()

    def documents(self, part: SourcePart, skip: Skip | None = None) -> Iterator[str]:
        """Read the stories of a byte range."""
        return self._files.documents(part, skip)

    @property
    def _files(self) -> Files:
        return Files((self.path,))

    def _recorded(self) -> dict[str, Any]:
        with reading(self._record_path):
            text = read_text(self._record_path)
        try:
            record = parse_json(text)
            return {"size": int(record["size"]), "sha256": str(record["sha256"])}
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(f"an unreadable record {self._record_path.name}") from error

    def _record(self, record: dict[str, Any]) -> None:
        write_atomic(self._record_path, json.dumps(record, indent=1).encode())

    def _damaged(self, problem: str) -> DataError:
        return DataError(f"{self.path} has {problem}; remove it and its .json to download it again")

    def _download(self) -> None:
        url = f"{self.base}/{self.path.name}"
        try:
            size, sha256 = _stated(url)
            self._fetch(url, size, sha256)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise DataError(
                f"cannot download {url}: {error}. Use data.source = stdlib or your own files "
                f"instead, or place the file at {self.path}"
            ) from error
        self._record({"url": url, "size": size, "sha256": sha256})

    def _fetch(self, url: str, size: int, sha256: str) -> None:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer, AtomicFile(self.path) as out:
            while chunk := answer.read(MIB):
                out.write(chunk)
                if out.hash.size > size:
                    break
                if self.progress:
                    self.progress(out.hash.size, size)
            if out.hash.size != size:
                received = f"{format_bytes(out.hash.size)} ({out.hash.size} bytes)"
                raise ValueError(f"got {received}, the server states {size} bytes")
            if out.hash.sha256 != sha256:
                raise ValueError(f"got SHA-256 {out.hash.sha256}, the server states {sha256}")


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the hub states size and hash in its own answer."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> None:
        return None


def _stated(url: str) -> tuple[int, str]:
    """Ask the hub for the size and the SHA-256 of a file that it keeps in LFS."""
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.build_opener(_StayHere).open(request, timeout=TIMEOUT_S) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        with error:
            if error.code not in (301, 302, 303, 307, 308):
                raise
            headers = error.headers
    sha256 = (headers.get("X-Linked-Etag") or "").strip('"')
    size = headers.get("X-Linked-Size") or ""
    if len(sha256) != 64 or not size.isdigit():
        raise ValueError("the server states no size and SHA-256 for it")
    return int(size), sha256
