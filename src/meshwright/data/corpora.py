"""Sources of documents: the standard library, text and jsonl files, Hugging Face data sets.

TinyStories is downloaded once from the Hugging Face Hub and compared with its stated hash.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

from meshwright.data.conversations import RowReader, rows_of
from meshwright.data.formats import (
    SUFFIXES,
    Piece,
    Problem,
    boundary,
    is_lines,
    is_whole,
    no_rows,
    read_whole,
    rows_of_lines,
    texts,
)
from meshwright.errors import DataError, nearest, refusal
from meshwright.files import hash_file, locked, read_text, reading, write_atomic
from meshwright.parsing import parse_json
from meshwright.spec.training import DataFormat
from meshwright.units import MIB

_SHA256_DIGITS: Final = 64
REPOSITORY: Final = "roneneldan/TinyStories"
FILES = {"train": "TinyStoriesV2-GPT4-train.txt", "valid": "TinyStoriesV2-GPT4-valid.txt"}


@dataclass(frozen=True)
class TinyStories:
    """The GPT-4 stories of TinyStories (2.2 GB, or 22 MB for the part "valid"), stored in `folder`.

    The file is downloaded if it is missing; a file placed there by hand is used as it is. Its
    SHA-256 is recorded beside it and checked before each later use.
    """

    folder: Path
    part: str = "train"

    def __post_init__(self) -> None:
        if self.part not in FILES:
            raise DataError(f"source = tinystories:{self.part}; the parts are {', '.join(FILES)}")

    @property
    def path(self) -> Path:
        """The path of the file, whether or not it has been downloaded."""
        return self.folder / FILES[self.part]

    @property
    def _record_path(self) -> Path:
        return self.path.with_name(self.path.name + ".json")

    def fingerprint(self) -> Fingerprint:
        """Return the file's recorded size and SHA-256, after downloading it if it is missing."""
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
        """Return byte ranges that cover the file; raises DataError if its hash has changed."""
        record = self.fingerprint()
        sha256 = hash_file(self.path).sha256
        if sha256 != record["sha256"]:
            raise self._damaged(f"SHA-256 {sha256}, recorded {record['sha256']}")
        return self._files.parts()

    def documents(self, part: SourcePart, skip: Skip | None = None) -> Iterator[str]:
        """Yield the stories in a byte range of the file."""
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
        """Download the file to a folder beside it, and move it to its place if its hash is right.

        What arrived before an interruption is kept there, and not downloaded again.
        """
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        name, arriving = self.path.name, self.folder / f".{self.path.name}"
        url = hf_hub_url(REPOSITORY, name, repo_type="dataset")
        try:
            stated = get_hf_file_metadata(url)
            if stated.commit_hash is None or len(stated.etag or "") != _SHA256_DIGITS:
                raise ValueError("the server states no commit and SHA-256 for it")
            file = Path(
                hf_hub_download(
                    REPOSITORY,
                    name,
                    repo_type="dataset",
                    revision=stated.commit_hash,
                    local_dir=arriving,
                )
            )
            received = hash_file(file)
            if received.sha256 != stated.etag:
                file.unlink()
                raise ValueError(
                    f"got {received.size} bytes with SHA-256 {received.sha256}, the server states "
                    f"{stated.etag}"
                )
            file.replace(self.path)
        except Exception as error:  # of HTTP, the network, the disk: the library raises all kinds
            raise DataError(
                f"cannot download {url}: {error}. Use data.source = stdlib or your own files "
                f"instead, or place the file at {self.path}"
            ) from error
        shutil.rmtree(arriving, ignore_errors=True)
        self._record({"url": url, "size": received.size, "sha256": received.sha256})


PART_BYTES = 16 * MIB
HF_PART_ROWS = 20_000
HF_READERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}
Fingerprint = dict[str, Any]
Skip = Callable[[str], None]


@dataclass(frozen=True)
class SourcePart:
    """A piece of a source: bytes `start` to `stop` of a file, or such rows of a data set.

    `size` is the size of its text in bytes, exact for files and an estimate for rows.
    """

    path: str
    start: int
    stop: int
    size: int


class Source(Protocol):
    """A corpus of documents; must be picklable, so that worker processes can read it."""

    def fingerprint(self) -> Fingerprint:
        """Return JSON values that change if the corpus does, computed without reading all of it."""

    def parts(self) -> list[SourcePart]:
        """Return the parts to read, in order; raises DataError if there is nothing to read."""

    def documents(self, part: SourcePart, skip: Skip | None = None) -> Iterator[str]:
        """Yield the non-empty documents of one part in order.

        `skip` is called with a line of text for each file or row that cannot be read as text;
        without `skip`, it raises DataError.
        """


@dataclass(frozen=True)
class Stdlib:
    """The source files of Python's standard library, one document per file.

    Available on every machine. Tests and installed packages are left out, as are `encodings` and
    `pydoc_data`, which are generated tables. Files that are not UTF-8 are skipped.
    """

    root: Path = Path(os.__file__).parent

    _LEFT_OUT = frozenset(
        {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        | {"encodings", "pydoc_data"}
    )

    def _files(self) -> list[Path]:
        files = _walk(self.root, (".py",), self._LEFT_OUT)
        if not files:
            raise DataError(
                f"the Python standard library has no sources in {self.root}; use own text files"
            )
        return files

    def fingerprint(self) -> Fingerprint:
        """Return the interpreter's version and a hash of the file names and sizes."""
        listing = "".join(
            f"{path.relative_to(self.root).as_posix()} {path.stat().st_size}\n"
            for path in self._files()
        )
        version = f"{platform.python_implementation()} {platform.python_version()}"
        digest = hashlib.sha256(listing.encode()).hexdigest()
        return {"kind": "stdlib", "python": version, "files": digest}

    def parts(self) -> list[SourcePart]:
        """Return one part per file."""
        return [_whole(path) for path in self._files() if path.stat().st_size]

    def documents(self, part: SourcePart, skip: Skip | None = None) -> Iterator[str]:
        """Yield the text of one source file, unless it is blank or not UTF-8."""
        try:
            text = _read(part).decode("utf-8")
        except UnicodeDecodeError:
            return
        if text.strip():
            yield text


@dataclass(frozen=True)
class Files:
    """Files and folders as a source of documents, in the given order; a folder's files are sorted.

    Each row of jsonl, JSON, CSV and Parquet is a document: the text in its field `text_key`, or
    with `format` "chat" its conversation in the form of `Conversation.to_text`. A text file is one
    document, or is split at `separator`, by default at `<|endoftext|>` if its first MiB contains
    it. A separator of two newlines splits at blank lines, an empty one nowhere. `data.formats`
    lists the file types.
    """

    paths: tuple[Path, ...]
    text_key: str = "text"
    separator: str | None = None
    format: DataFormat = "text"

    @property
    def _rows(self) -> RowReader:
        return rows_of(self.format, self.text_key)

    def _files(self) -> list[Path]:
        files: list[Path] = []
        for path in self.paths:
            if path.is_dir():
                inside = _walk(path, SUFFIXES, frozenset())
                if not inside:
                    kinds = " ".join(dict.fromkeys(Path(suffix).stem for suffix in SUFFIXES))
                    raise DataError(f"{path} has no text files (looked for {kinds})")
                files += inside
            elif path.is_file():
                files.append(path)
            else:
                raise DataError(_missing(path))
        return files

    def left_out(self) -> list[Path]:
        """Return the files in the given folders that are not read, because of their suffix."""
        folders = [path for path in self.paths if path.is_dir()]
        return [
            path
            for folder in folders
            for path in _walk(folder, ("",), frozenset())
            if not path.name.lower().endswith(SUFFIXES)
        ]

    def split_by_default(self) -> list[Path]:
        """Return the text files that are split into documents although no separator was given."""
        if self.separator is not None:
            return []
        texts = [path for path in self._files() if not is_whole(path) and not is_lines(path)]
        return [path for path in texts if self._boundary(path) is not None]

    def fingerprint(self) -> Fingerprint:
        """Return the options and a hash of each file's path, size and modification time."""
        listing = hashlib.sha256()
        for path in self._files():
            with reading(path):
                state = path.stat()
            listing.update(f"{path.absolute()}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
        return {
            "kind": "files",
            "paths": [str(path) for path in self.paths],
            "files": listing.hexdigest(),
            "text_key": self.text_key,
            "separator": self.separator,
            **_stated(self.format),
        }

    def parts(self) -> list[SourcePart]:
        """Return one part per file; large files are cut between documents at about `PART_BYTES`."""
        parts = [part for path in self._files() for part in self._cut(path)]
        if not parts:
            raise DataError(f"the corpus is empty: {', '.join(map(str, self.paths))}")
        return parts

    def _cut(self, path: Path) -> Iterator[SourcePart]:
        with reading(path):
            size = path.stat().st_size
            if size == 0:
                return
            pattern = None if is_whole(path) else self._boundary(path)
            if size <= PART_BYTES or pattern is None:
                yield _whole(path)
                return
            # Documents are stripped, so a cut after any separator gives the same documents.
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                start = 0
                while start < size:
                    match = pattern.search(data, min(start + PART_BYTES, size))
                    stop = match.end() if match else size
                    yield SourcePart(str(path), start, stop, stop - start)
                    start = stop

    def _boundary(self, path: Path) -> re.Pattern[bytes] | None:
        """Return the pattern between the documents of a file; None if it is one document."""
        if is_lines(path):
            return re.compile(rb"\n")
        if self.separator is not None:
            return boundary(self.separator, b"")
        with reading(path), path.open("rb") as file:
            return boundary(None, file.read(MIB))

    def documents(self, part: SourcePart, skip: Skip | None = None) -> Iterator[str]:
        """Yield the documents of a file or of a byte range of it."""
        for piece in self._pieces(part):
            if isinstance(piece, Problem):
                if skip is None:
                    raise DataError(f"{piece}. data.on_error=skip passes over such files and rows")
                skip(str(piece))
            elif piece.strip():
                yield piece

    def _pieces(self, part: SourcePart) -> Iterator[Piece]:
        path = Path(part.path)
        if is_whole(path):
            yield from read_whole(path, self._rows, self.separator)
            return
        content = _read(part)
        if is_lines(path):
            # Counted only where a line is wrong: earlier parts of the file end at line ends.
            lines = enumerate(content.split(b"\n"), 1)
            for piece in rows_of_lines(path, lines, self._rows, part.start):
                yield piece if isinstance(piece, str) else _below(piece, part)
            return
        if self.format == "chat":
            yield no_rows(path)
            return
        yield from texts(path, content, self._boundary(path), part.start)


@dataclass(frozen=True)
class HuggingFace:
    """A data set read by the `datasets` library: its name, configuration and split.

    The name is that of a data set on the hub, or a local folder or file that the library can read.
    """

    name: str
    config: str | None = None
    split: str = "train"
    text_key: str = "text"
    format: DataFormat = "text"

    @staticmethod
    def parse(text: str, text_key: str, form: DataFormat = "text") -> HuggingFace:
        """Return the source that `NAME`, `NAME:CONFIG` or `NAME:CONFIG:SPLIT` describes.

        An empty CONFIG is the default configuration, an omitted SPLIT is "train".
        """
        name, _, config_and_split = text.partition(":")
        config, _, split = config_and_split.partition(":")
        if not name or ":" in split:
            raise DataError(f'source = "hf:{text}": write hf:NAME or hf:NAME:CONFIG:SPLIT')
        return HuggingFace(name, config or None, split or "train", text_key, form)

    def load(self, *, streaming: bool) -> Any:
        """Return the library's data set, downloaded or streaming; raises DataError if it cannot."""
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                f"source = hf:{self.name} needs the datasets library: pip install 'meshwright[hf]'"
            ) from error
        path = Path(self.name)
        named = {"path": self.name, "name": self.config}
        if path.is_file():
            named = {"path": HF_READERS.get(path.suffix.lower(), "text"), "data_files": self.name}
        try:
            rows = datasets.load_dataset(**named, split=self.split, streaming=streaming)
        except Exception as error:  # network, cache, names: the library raises all kinds
            raise DataError(f"cannot load hf:{self.name}: {error!s:.300}") from error
        if rows.column_names is not None:  # a stream may not know its columns before it is read
            try:
                self._reader.columns(rows.column_names)
            except ValueError as error:
                raise DataError(f"hf:{self.name}: {error}") from None
        return rows

    @property
    def _reader(self) -> RowReader:
        return rows_of(self.format, self.text_key)

    @cached_property
    def _rows(self) -> Any:
        return self.load(streaming=False)

    def document(self, number: int, row: object) -> str:
        """Return the document of row `number`; raises DataError if it has none."""
        where = f"hf:{self.name}, row {number}"
        try:
            return self._reader.document(row, where, is_padded=True)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        # Each process loads the rows itself, from the library's cache.
        return {key: value for key, value in self.__dict__.items() if key != "_rows"}

    def fingerprint(self) -> Fingerprint:
        """Return the data set's names and the library's own fingerprint of its rows."""
        names = {"kind": "hf", "name": self.name, "config": self.config, "split": self.split}
        content = {"text_key": self.text_key, "rows": len(self._rows)}
        fingerprint = {"fingerprint": str(self._rows._fingerprint)}
        return names | content | fingerprint | _stated(self.format)

    def parts(self) -> list[SourcePart]:
        """Return ranges of `HF_PART_ROWS` rows that cover the data set."""
        count = len(self._rows)
        if count == 0:
            raise DataError(f"the corpus is empty: hf:{self.name}")
        per_row = max(1, int(self._rows.data.nbytes) // count)
        starts = range(0, count, HF_PART_ROWS)
        stops = (min(start + HF_PART_ROWS, count) for start in starts)
        return [SourcePart("", a, b, (b - a) * per_row) for a, b in zip(starts, stops, strict=True)]

    def documents(self, part: SourcePart, skip: Skip | None = None) -> Iterator[str]:
        """Yield the documents of a range of rows."""
        columns = self._reader.columns(self._rows.column_names)
        read = self._rows[part.start : part.stop]
        values = zip(*(read[name] for name in columns), strict=True)
        for number, row in enumerate(values, part.start):
            try:
                document = self.document(number, dict(zip(columns, row, strict=True)))
            except DataError as error:
                if skip is None:
                    raise
                skip(str(error))
                continue
            if document.strip():
                yield document


def _stated(form: DataFormat) -> Fingerprint:
    """Return the entry for a data format in a fingerprint.

    It is empty for "text", as fingerprints written before there were other formats lack it.
    """
    return {} if form == "text" else {"format": form}


def _walk(root: Path, suffixes: tuple[str, ...], left_out: frozenset[str]) -> list[Path]:
    """Return the files under a folder with one of the suffixes, sorted by path.

    Hidden files and folders, and folders named in `left_out`, are skipped.
    """
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in left_out and not f.startswith(".")]
        paths += [
            Path(folder, name)
            for name in names
            if name.lower().endswith(suffixes) and not name.startswith(".")
        ]
    return sorted((path for path in paths if path.is_file()), key=Path.as_posix)


def _whole(path: Path) -> SourcePart:
    file_bytes = path.stat().st_size
    return SourcePart(str(path), 0, file_bytes, file_bytes)


def _read(part: SourcePart) -> bytes:
    path = Path(part.path)
    with reading(path), path.open("rb") as file:
        file.seek(part.start)
        content = file.read(part.stop - part.start)
    if len(content) != part.stop - part.start:
        raise DataError(f"{path} has become shorter while it was being read")
    return content


def _below(problem: Problem, part: SourcePart) -> Problem:
    """Return a problem with its line number counted from the start of the file, not of the part."""
    where, _, number = problem.where.rpartition(" ")
    above = _read(SourcePart(part.path, 0, part.start, part.start)).count(b"\n")
    return problem._replace(where=f"{where} {above + int(number)}")


def _missing(path: Path) -> str:
    known = nearest(str(path), ("stdlib", "tinystories"))
    hint = "A source is stdlib, tinystories, hf:NAME, or the path of a file or folder"
    return refusal(f"no such file or folder: {path}", legal=known, hint=hint)
