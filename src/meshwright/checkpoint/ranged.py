"""Reads tensors of a safetensors object in a store by the byte ranges that a rank needs."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.models.files import MAX_TENSORS, open_safetensors
from meshwright.parsing import parse_json
from meshwright.store import PIECE, REQUESTS, ByteRange, Place, StorePath, beside
from meshwright.units import KIB, MIB

DTYPES: Final = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LONGEST_HEADER: Final = 100 * MIB  # safetensors' own limit
_BEGINNING: Final = 64 * KIB  # read at first: the headers of most files are shorter
# Read in vain where that saves a request.
_GAP: Final = 256 * KIB


def open_stored(path: Place) -> Any:
    """Open a safetensors file, or object, for reading on the CPU; reads only its header.

    Raises `CheckpointError` if it is not valid.
    """
    return RangedFile(path) if isinstance(path, StorePath) else open_safetensors(path)


class _Entry(NamedTuple):
    dtype: torch.dtype
    shape: list[int]
    start: int  # of its first byte in the object


class RangedFile:
    """A safetensors object with the methods of `safe_open` that steps need."""

    def __init__(self, path: StorePath) -> None:
        self._path = path
        self._ahead: ReadAhead | None = None
        try:
            beginning = path.read(0, _BEGINNING)
            (length,) = struct.unpack("<Q", beginning[:8])
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            remaining = path.read(len(beginning), 8 + length)
            header = parse_json((beginning + remaining)[8 : 8 + length])
            self._metadata = header.pop("__metadata__", {})
            self._entries = dict(_entries(header, 8 + length, path.stat().st_size))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
            raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from error

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._entries)

    def metadata(self) -> Mapping[str, str]:
        """Return the texts of the header."""
        return dict(self._metadata)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor."""
        entry = self._entries[name]
        return self._tensor(entry, self.span(name)).view(entry.shape)

    def get_slice(self, name: str) -> RangedSlice:
        """Return a tensor of which nothing is read before it is indexed."""
        return RangedSlice(self, name)

    def span(self, name: str, rows: tuple[int, int] | None = None) -> ByteRange:
        """Return the bytes of a tensor, or of rows along its first dim."""
        entry = self._entries[name]
        first, last = rows or (0, entry.shape[0] if entry.shape else 1)
        width = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        return ByteRange(self._path, entry.start + first * width, entry.start + last * width)

    def take_from(self, ahead: ReadAhead) -> None:
        """Take what is asked for from `ahead` where it has it."""
        self._ahead = ahead

    def _tensor(self, entry: _Entry, span: ByteRange) -> Tensor:
        """Return the elements in a span, flat."""
        if span.size == 0:
            return torch.empty(0, dtype=entry.dtype)
        data = None if self._ahead is None else self._ahead.take(span)
        if data is None:
            data = bytearray().join(beside(ByteRange.read, span.cut(PIECE)))
        if len(data) != span.size:
            raise CheckpointError(f"{self._path} ended early: it is shorter than its header says")
        return torch.frombuffer(data, dtype=entry.dtype)


class RangedSlice:
    """A tensor of an object, read by the rows along its first dim that an index covers."""

    def __init__(self, file: RangedFile, name: str) -> None:
        self._file, self._name = file, name

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._file._entries[self._name].shape)

    def __getitem__(self, index: Sequence[slice]) -> Tensor:
        entry = self._file._entries[self._name]
        first, last, _ = index[0].indices(entry.shape[0])
        span = self._file.span(self._name, (first, last))
        shape = [last - first, *entry.shape[1:]]
        return self._file._tensor(entry, span).view(shape)[(slice(None), *index[1:])]


class ReadAhead:
    """Reads spans of objects before they are taken, neighbours of one object by one request.

    `spans` come in the order in which they will be taken. Requests are made beside each other, as
    long as what was read and not yet taken is less than `REQUESTS * PIECE` bytes, and always for
    what is taken next: so at most twice those bytes are in memory.
    """

    def __init__(self, spans: Sequence[ByteRange]) -> None:
        budget = REQUESTS * PIECE
        objects = len({span.path for span in spans})
        self._cut = max(1, min(PIECE, budget // max(1, objects)))
        self._requests, self._of_piece = _merged(
            [piece for span in spans for piece in span.cut(self._cut)], self._cut
        )
        self._left = [0] * len(self._requests)  # pieces of each request that were not taken yet
        for numbers in self._of_piece.values():
            for number in numbers:
                self._left[number] += 1
        self._budget = budget
        self._futures: dict[int, Future[bytes]] = {}
        self._next = 0
        self._pool = ThreadPoolExecutor(REQUESTS, "read-ahead")
        self._fill(0)

    def take(self, span: ByteRange) -> bytearray | None:
        """Return the bytes of a span; None if it is none of those to come."""
        pieces = span.cut(self._cut)
        if not all(self._of_piece.get(piece) for piece in pieces):
            return None
        data = bytearray()
        for piece in pieces:
            number = self._of_piece[piece].pop(0)
            self._fill(number + 1)
            request = self._requests[number]
            read = self._futures[number].result()
            data += memoryview(read)[piece.start - request.start : piece.stop - request.start]
            self._left[number] -= 1
            if self._left[number] == 0:
                del self._futures[number]
        self._fill(0)
        if self._next == len(self._requests) and not self._futures:
            self._pool.shutdown(wait=False)
        return data

    @property
    def unread(self) -> int:
        """The bytes of requests that were made, and of which not all was taken."""
        return sum(self._requests[number].size for number in self._futures)

    def _fill(self, needed: int) -> None:
        """Make the requests before number `needed`, and further ones within the budget."""
        unread = self.unread
        while self._next < len(self._requests):
            request = self._requests[self._next]
            if self._next >= needed and self._futures and unread + request.size > self._budget:
                return
            self._futures[self._next] = self._pool.submit(request.read)
            self._next, unread = self._next + 1, unread + request.size


def _merged(
    pieces: Sequence[ByteRange], limit: int
) -> tuple[list[ByteRange], dict[ByteRange, list[int]]]:
    """Return the requests for pieces that come in the order of their use, and those of each piece.

    Pieces of one object that come after each other, of `limit` bytes together, are one batch;
    within a batch, those that lie next to each other are one request of at most `limit` bytes.
    """
    batches: list[list[ByteRange]] = []
    latest: dict[StorePath, tuple[list[ByteRange], int]] = {}
    for piece in pieces:
        batch, size = latest.get(piece.path, ([], limit))
        if size + piece.size > limit:
            batch, size = [], 0
            batches.append(batch)
        batch.append(piece)
        latest[piece.path] = batch, size + piece.size
    requests: list[ByteRange] = []
    numbers: dict[ByteRange, list[int]] = defaultdict(list)
    for batch in batches:
        first = len(requests)
        for piece in sorted(batch, key=lambda piece: piece.start):
            last = requests[-1] if len(requests) > first else None
            stop = 0 if last is None else max(last.stop, piece.stop)
            if last and piece.start <= last.stop + _GAP and stop - last.start <= limit:
                requests[-1] = last._replace(stop=stop)
            else:
                requests.append(piece)
            numbers[piece].append(len(requests) - 1)
    return requests, dict(numbers)


def _entries(header: Mapping[str, Any], data: int, size: int) -> Any:
    """Yield the name and the entry of each tensor, whose data begins at `data` of `size` bytes."""
    if len(header) > MAX_TENSORS:
        raise ValueError(f"{len(header)} tensors, more than {MAX_TENSORS}")
    for name, fields in header.items():
        entry = _Entry(
            DTYPES[fields["dtype"]], [*fields["shape"]], data + fields["data_offsets"][0]
        )
        is_sound = all(isinstance(length, int) and length >= 0 for length in entry.shape)
        stop = entry.start + math.prod(entry.shape) * entry.dtype.itemsize
        if not is_sound or not data <= entry.start <= stop <= size:
            raise ValueError(f"{name} does not lie within its {size} bytes")
        yield name, entry
