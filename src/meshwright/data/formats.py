"""Readers of the documents in a file, by its suffix: text, jsonl, JSON, CSV, Parquet, compressed.

A reader yields a document's text, or a `Problem` for a row or a file that has none. The caller
decides whether a problem is an error.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, NamedTuple, cast

from meshwright.data.conversations import ChatRows, RowReader
from meshwright.errors import DataError
from meshwright.files import reading
from meshwright.parsing import distinct_keys, parse_json

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
# Parquet compresses by itself.
_PACKABLE: Final = tuple(suffix for suffix in _INSIDE if suffix != ".parquet")
SUFFIXES: Final = (
    *_INSIDE,
    *(suffix + packed for suffix in _PACKABLE for packed in PACKED_SUFFIXES),
)
# Rows of a Parquet file in memory at a time.
_ROWS: Final = 1024
_NUL: Final = "it has NUL characters: UTF-16 read as UTF-8 looks like this"
# Characters of the longest CSV field. Python's default, 131,072, is too short for documents.
_FIELD: Final = 2**31 - 1


class Problem(NamedTuple):
    """Why a row or a file has no text, and where it is."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


Piece = str | Problem


def kind_of(path: Path) -> tuple[str, str | None]:
    """Return the suffix of a file's content, and the suffix of its compression or None."""
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED_SUFFIXES if name.endswith(suffix)), None)
    return Path(name.removesuffix(packed or "")).suffix, packed


def is_lines(path: Path) -> bool:
    """Return whether each line of a file is a row that can be read independently (jsonl)."""
    suffix, packed = kind_of(path)
    return suffix in JSONL_SUFFIXES and packed is None


def is_whole(path: Path) -> bool:
    """Return whether a file can only be read from beginning to end: tables and compressed files."""
    suffix, packed = kind_of(path)
    return packed is not None or suffix in TABLE_SUFFIXES


def read_whole(path: Path, rows: RowReader, separator: str | None) -> Iterator[Piece]:
    """Yield the documents of a file that can only be read from beginning to end.

    `rows` converts rows to documents; `separator` divides texts, see `boundary`. Raises DataError
    for a file that cannot be read, or that needs a library that is not installed.
    """
    suffix, packed = kind_of(path)
    if suffix == ".parquet":
        yield from _parquet(path, rows)
        return
    with reading(path), _opened(path) as file:
        try:
            if suffix in JSONL_SUFFIXES:
                yield from rows_of_lines(path, enumerate(file, 1), rows)
            elif suffix == ".json":
                yield from _json(path, file.read(), rows)
            elif suffix in (".csv", ".tsv"):
                yield from _csv(path, file, rows, "\t" if suffix == ".tsv" else ",")
            elif isinstance(rows, ChatRows):
                yield no_rows(path)
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

        file: IO[bytes] = zstandard.open(path, "rb")
        return file
    with suppress(ImportError):
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
        return io.BufferedReader(stream)
    raise DataError(f"{path} needs the zstandard library: pip install 'meshwright[zstd]'")


def no_rows(path: Path) -> Problem:
    """Return the problem of a text file that was given as a source of conversations."""
    return Problem(str(path), "a text; conversations are rows of jsonl, JSON, CSV or Parquet")


def boundary(separator: str | None, head: bytes) -> re.Pattern[bytes] | None:
    """Return the pattern between documents in a text; None if the whole text is one document.

    With `separator` None, it is `END_OF_TEXT` if the beginning of the text, `head`, contains it. A
    separator of two newlines matches any run of blank lines.
    """
    if separator is None:
        separator = END_OF_TEXT if END_OF_TEXT.encode() in head else ""
    if separator == BLANK_LINE:
        return re.compile(rb"\n[ \t\r]*\n")
    return re.compile(re.escape(separator.encode())) if separator else None


def texts(
    path: Path, content: bytes, pattern: re.Pattern[bytes] | None, start: int = 0
) -> Iterator[Piece]:
    """Yield the parts of a text between matches of `pattern`; None yields all of it.

    `start` is the position of the text in its file, in bytes, for messages.
    """
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
    if "\0" in text:
        return Problem(str(path), _NUL)
    return text.strip() if strips else text


def rows_of_lines(
    path: Path, lines: Iterator[tuple[int, bytes]], rows: RowReader, start: int = 0
) -> Iterator[Piece]:
    """Yield the document of each numbered line of JSON; blank lines are skipped.

    `start` is the byte of the file from which lines are counted, for messages.
    """
    after = f" after byte {start}" if start else ""
    for number, line in lines:
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            yield rows.document(parse_json(line, distinct_keys), where + after)
        except ValueError as error:
            yield Problem(where, str(error))


def _json(path: Path, content: bytes, rows: RowReader) -> Iterator[Piece]:
    try:
        document = parse_json(content, distinct_keys)
    except ValueError as error:
        yield Problem(str(path), f"not JSON: {error}")
        return
    for number, row in enumerate(document if isinstance(document, list) else [document], 1):
        yield from _row(f"{path}, row {number}", row, rows)


def _csv(path: Path, file: IO[bytes], rows: RowReader, delimiter: str) -> Iterator[Piece]:
    """Yield the documents of a CSV table; each row must have as many fields as the header.

    A CSV reader takes what follows a stray quote as part of one field, including later rows. This
    shows as a quote that never closes, text after a closing quote, or another number of fields.
    """
    csv.field_size_limit(_FIELD)
    with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        read = csv.reader(text, delimiter=delimiter, strict=True)
        number, first_line = 0, 1
        try:
            header = next(read, [])
            if repeated := [name for name, count in Counter(header).items() if count > 1]:
                yield Problem(f"{path}, line 1", f"two columns are called {repeated[0]!r}")
                return
            first_line = read.line_num + 1
            for values in read:
                if values:  # else a blank line
                    number += 1
                    where = f"{path}, row {number}"
                    yield from _table_row(where, first_line, header, values, rows)
                first_line = read.line_num + 1
        except (csv.Error, UnicodeDecodeError) as error:  # no row after it can be told
            where = f"{path}, after row {number}"
            if isinstance(error, UnicodeDecodeError):
                yield Problem(where, f"{error}; no row from here on is read")
                return
            reason = f"quotes do not pair up ({error}), so no row from here on can be told apart"
            yield Problem(f"{where}, from line {first_line}", reason)


def _table_row(
    where: str, line: int, header: Sequence[str], values: Sequence[str], rows: RowReader
) -> Iterator[Piece]:
    if len(values) != len(header):
        fields = f"line {line} has {len(values)} fields, but the header has {len(header)}"
        yield Problem(where, f"{fields}: a delimiter or a quote is missing or too many")
    elif any("\0" in value for value in values):
        yield Problem(where, _NUL)
    else:
        yield from _row(where, dict(zip(header, values, strict=True)), rows)


def _parquet(path: Path, rows: RowReader) -> Iterator[Piece]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path} needs pyarrow: pip install 'meshwright[hf]'") from None
    number = 0
    with reading(path):
        try:
            with ParquetFile(path) as file:
                try:
                    columns = rows.columns(file.schema_arrow.names)
                except ValueError as error:
                    yield Problem(str(path), str(error))
                    return
                for batch in file.iter_batches(_ROWS, columns=columns):
                    for row in batch.to_pylist():
                        number += 1
                        yield from _row(f"{path}, row {number}", row, rows, is_padded=True)
        except UnicodeDecodeError as error:  # the whole batch is decoded at once
            yield Problem(f"{path}, after row {number}", str(error))
        except ArrowException as error:
            yield Problem(str(path), f"not Parquet: {error!s:.200}")


def _row(where: str, row: object, rows: RowReader, *, is_padded: bool = False) -> Iterator[Piece]:
    try:
        yield rows.document(row, where, is_padded=is_padded)
    except ValueError as error:
        yield Problem(where, str(error))
