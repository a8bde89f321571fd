"""How the documents of a file are read, by its name: text, jsonl, JSON, CSV, Parquet, compressed.

A reader yields pieces: a text, or a `Problem` where a row or the file has none. The caller decides
whether a problem is an error.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from meshwright.data.files import reading
from meshwright.errors import DataError, nearest, refusal
from meshwright.parsing import parse_json

END_OF_TEXT: Final = "<|endoftext|>"
BLANK_LINE: Final = "\n\n"
TEXT_SUFFIXES: Final = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".hpp"),
    *(".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh"),
)
JSONL_SUFFIXES: Final = (".jsonl", ".ndjson")
TABLE_SUFFIXES: Final = (".json", ".csv", ".tsv", ".parquet")
PACKED_SUFFIXES: Final = (".gz", ".zst")
_INSIDE: Final = (*TEXT_SUFFIXES, *JSONL_SUFFIXES, *TABLE_SUFFIXES)
_PACKABLE: Final = tuple(one for one in _INSIDE if one != ".parquet")  # it compresses by itself
SUFFIXES: Final = (*_INSIDE, *(one + packed for one in _PACKABLE for packed in PACKED_SUFFIXES))
# Fields of rows that have a question in one field and its answer in another.
_DIALOGUES: Final = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("question", "answer"),
)
# Rows of a Parquet file in memory at a time.
_ROWS: Final = 1024
# Characters of the longest CSV field. Python's default, 131,072, is too short for documents.
_FIELD: Final = 2**31 - 1


class Problem(NamedTuple):
    """Why a row or a file gives no text, and where it is."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


Piece = str | Problem


def kind_of(path: Path) -> tuple[str, str | None]:
    """Return the suffix that says what a file holds, and that of its compression, if any."""
    name = path.name.lower()
    packed = next((one for one in PACKED_SUFFIXES if name.endswith(one)), None)
    return Path(name.removesuffix(packed or "")).suffix, packed


def is_lines(path: Path) -> bool:
    """Whether each line of a file is a row that can be read by itself, from any place in it."""
    suffix, packed = kind_of(path)
    return suffix in JSONL_SUFFIXES and packed is None


def is_whole(path: Path) -> bool:
    """Whether a file can only be read from its beginning to its end."""
    suffix, packed = kind_of(path)
    return packed is not None or suffix in TABLE_SUFFIXES


def read_whole(path: Path, key: str, separator: str | None) -> Iterator[Piece]:
    """Yield the documents of a file that is read from beginning to end.

    `key` is the field of rows, `separator` that of `boundary`. Raises DataError for a file that
    cannot be read, or that needs a library which is not installed.
    """
    suffix, packed = kind_of(path)
    if suffix == ".parquet":
        yield from _parquet(path, key)
        return
    with reading(path), _opened(path) as file:
        try:
            if suffix in JSONL_SUFFIXES:
                yield from rows_of_lines(path, enumerate(file, 1), key)
            elif suffix == ".json":
                yield from _json(path, file.read(), key)
            elif suffix in (".csv", ".tsv"):
                yield from _csv(path, file, key, "\t" if suffix == ".tsv" else ",")
            else:
                content = file.read()
                yield from texts(path, content, boundary(separator, content))
        except (OSError, EOFError, zlib.error) as error:
            if packed is None:
                raise
            yield Problem(str(path), f"damaged, or not compressed: {error}")


def _opened(path: Path) -> IO[bytes]:
    packed = kind_of(path)[1]
    if packed == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if packed is None:
        return path.open("rb")
    with suppress(ImportError):
        import zstandard

        found: IO[bytes] = zstandard.open(path, "rb")
        return found
    with suppress(ImportError):
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
        return io.BufferedReader(stream)
    raise DataError(f"{path} needs the zstandard library: pip install 'meshwright[zstd]'")


def boundary(separator: str | None, head: bytes) -> re.Pattern[bytes] | None:
    """Return what ends a document in a text that begins with `head`; None: it is one document.

    `separator` left out (None) is `END_OF_TEXT` where the head has it, and two newlines match any
    blank lines.
    """
    if separator is None:
        separator = END_OF_TEXT if END_OF_TEXT.encode() in head else ""
    if separator == BLANK_LINE:
        return re.compile(rb"\n[ \t\r]*\n")
    return re.compile(re.escape(separator.encode())) if separator else None


def texts(
    path: Path, content: bytes, pattern: re.Pattern[bytes] | None, start: int = 0
) -> Iterator[Piece]:
    """Yield the documents of a text between matches of a pattern; it begins at byte `start`."""
    position = 0
    for match in (*(pattern.finditer(content) if pattern else ()), None):
        end = match.start() if match else len(content)
        yield _decoded(path, start + position, content[position:end], strips=pattern is not None)
        position = match.end() if match else end


def _decoded(path: Path, start: int, content: bytes, *, strips: bool) -> Piece:
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        return Problem(str(path), f"not UTF-8 text: byte {start + error.start}")
    return text.strip() if strips else text


def rows_of_lines(path: Path, lines: Iterator[tuple[int, bytes]], key: str) -> Iterator[Piece]:
    """Yield the text of each numbered line of JSON."""
    for number, line in lines:
        if not line.strip():
            continue
        try:
            yield text_of(parse_json(line), key)
        except ValueError as error:
            yield Problem(f"{path}, line {number}", str(error))


def _json(path: Path, content: bytes, key: str) -> Iterator[Piece]:
    try:
        found = parse_json(content)
    except ValueError as error:
        yield Problem(str(path), f"not JSON: {error}")
        return
    for number, row in enumerate(found if isinstance(found, list) else [found], 1):
        yield from _row(f"{path}, row {number}", row, key)


def _csv(path: Path, file: IO[bytes], key: str, delimiter: str) -> Iterator[Piece]:
    csv.field_size_limit(_FIELD)
    with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        rows = csv.DictReader(text, delimiter=delimiter)
        number = 0
        try:
            for number, row in enumerate(rows, 1):
                yield from _row(f"{path}, row {number}", row, key)
        except (csv.Error, UnicodeDecodeError) as error:  # no row after it can be told
            yield Problem(f"{path}, after row {number}", str(error))


def _parquet(path: Path, key: str) -> Iterator[Piece]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path} needs pyarrow: pip install 'meshwright[hf]'") from None
    number = 0
    with reading(path):
        try:
            with ParquetFile(path) as file:
                names = file.schema_arrow.names
                if key not in names:
                    yield Problem(str(path), _no_field(key, dict.fromkeys(names)))
                    return
                for batch in file.iter_batches(_ROWS, columns=[key]):
                    for text in batch.column(0).to_pylist():
                        number += 1
                        yield from _row(f"{path}, row {number}", {key: text}, key)
        except UnicodeDecodeError as error:  # the whole batch is decoded at once
            yield Problem(f"{path}, after row {number}", str(error))
        except ArrowException as error:
            yield Problem(str(path), f"not Parquet: {error!s:.200}")


def _row(where: str, row: object, key: str) -> Iterator[Piece]:
    try:
        yield text_of(row, key)
    except ValueError as error:
        yield Problem(where, str(error))


def text_of(row: object, key: str) -> str:
    """Return the text of a row; raises ValueError where it has none."""
    if not isinstance(row, dict):
        raise ValueError(f"the row is a JSON {type(row).__name__}, not an object")
    if key not in row:
        raise ValueError(_no_field(key, row))
    text = row[key]
    if not isinstance(text, str):
        raise ValueError(f"field {key!r} is a {type(text).__name__}, not text")
    if not text.isascii():
        text.encode()  # a lone surrogate, legal in JSON, is not Unicode text
    return text


def _no_field(key: str, row: Mapping[str, Any]) -> str:
    for asked, answered in _DIALOGUES:
        if asked in row and answered in row:
            hint = (
                f"{asked!r} and {answered!r} are halves of a dialogue: write both into one field, "
                "in the format that the model is to learn. Training on one alone would drop the "
                "other"
            )
            return refusal(f"no field {key!r}", hint=hint)
    legal = nearest(key, row) or [str(name) for name in list(row)[:5]]
    return refusal(f"no field {key!r}", legal=legal, hint="Name the field with data.text_key")
