"""How the documents of a file are read, by its name: text, jsonl, JSON, CSV, Parquet, compressed.

A reader yields pieces: a text, or a `Problem` where a row or the file has none. Who reads decides
whether a problem ends it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from meshwright.data.files import reading
from meshwright.errors import DataError, nearest, refusal

BLANK_LINE = "\n\n"
TEXT_SUFFIXES: Final = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".hpp"),
    *(".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh"),
)
JSONL_SUFFIXES: Final = (".jsonl", ".ndjson")
TABLE_SUFFIXES: Final = (".json", ".csv", ".tsv", ".parquet")
PACKED_SUFFIXES: Final = (".gz", ".zst")
_INSIDE: Final = (*TEXT_SUFFIXES, *JSONL_SUFFIXES, *TABLE_SUFFIXES)
SUFFIXES: Final = (*_INSIDE, *(one + packed for one in _INSIDE for packed in PACKED_SUFFIXES))
# Fields of rows that hold a question and its answer, which no one field holds.
_DIALOGUES: Final = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("question", "answer"),
)
# Rows of Parquet that are in memory together.
_ROWS: Final = 1024
# The largest field of a CSV that Python's reader takes is set for all readers.
_FIELD: Final = 2**31 - 1


class Problem(NamedTuple):
    """What is the matter with a row or a file, and where."""

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


def read_whole(path: Path, key: str, separator: str | None, end_of_text: str) -> Iterator[Piece]:
    """Yield the documents of a file that is read from beginning to end.

    `key` is the field of rows, `separator` what ends a document of a text (None: `end_of_text`
    where it is there). Raises DataError for a file that cannot be read, or needs a library.
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
                yield from _texts(path, file.read(), separator, end_of_text)
        except (OSError, EOFError, zlib.error) as error:
            if packed is None:
                raise
            yield Problem(str(path), f"not whole, or not compressed: {error}")


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


def rows_of_lines(path: Path, lines: Iterator[tuple[int, bytes]], key: str) -> Iterator[Piece]:
    """Yield the text of each numbered line of JSON."""
    for number, line in lines:
        if not line.strip():
            continue
        try:
            yield text_of(json.loads(line), key)
        except (ValueError, RecursionError) as error:
            yield Problem(f"{path}, line {number}", str(error))


def _json(path: Path, content: bytes, key: str) -> Iterator[Piece]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
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
    with reading(path):
        try:
            with ParquetFile(path) as file:
                names = file.schema_arrow.names
                if key not in names:
                    yield Problem(str(path), _no_field(key, dict.fromkeys(names)))
                    return
                number = 0
                for batch in file.iter_batches(_ROWS, columns=[key]):
                    for text in batch.column(0).to_pylist():
                        number += 1
                        yield from _row(f"{path}, row {number}", {key: text}, key)
        except ArrowException as error:
            yield Problem(str(path), f"not Parquet: {error!s:.200}")


def _texts(path: Path, content: bytes, separator: str | None, end: str) -> Iterator[Piece]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Problem(str(path), f"not UTF-8 text: byte {error.start}")
        return
    if separator is None and end not in text:
        yield text
        return
    pattern = r"\n[ \t\r]*\n" if separator == BLANK_LINE else re.escape(separator or end)
    yield from (one.strip() for one in re.split(pattern, text))


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
                "in the format that the model is to learn. One of them alone would be trained on "
                "without the other"
            )
            return refusal(f"no field {key!r}", hint=hint)
    legal = nearest(key, row) or [str(name) for name in list(row)[:5]]
    return refusal(f"no field {key!r}", legal=legal, hint="Name the field with data.text_key")
