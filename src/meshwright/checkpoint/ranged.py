"""Reads tensors of a safetensors object in a store by the byte ranges that a rank needs."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.models.files import MAX_TENSORS, open_safetensors
from meshwright.parsing import parse_json
from meshwright.store import Place, StorePath
from meshwright.units import MIB

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
        try:
            (length,) = struct.unpack("<Q", path.read(0, 8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = parse_json(path.read(8, 8 + length))
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
        return self._rows(entry, 0, math.prod(entry.shape)).view(entry.shape)

    def get_slice(self, name: str) -> RangedSlice:
        """Return a tensor of which nothing is read before it is indexed."""
        return RangedSlice(self, self._entries[name])

    def _rows(self, entry: _Entry, first: int, last: int) -> Tensor:
        """Return the elements from `first` to `last`, flat."""
        if last == first:
            return torch.empty(0, dtype=entry.dtype)
        size = entry.dtype.itemsize
        data = bytearray(self._path.read(entry.start + first * size, entry.start + last * size))
        if len(data) != (last - first) * size:
            raise CheckpointError(f"{self._path} ended early: it is shorter than its header says")
        return torch.frombuffer(data, dtype=entry.dtype)


class RangedSlice:
    """A tensor of an object, read by the rows along its first dim that an index covers."""

    def __init__(self, file: RangedFile, entry: _Entry) -> None:
        self._file, self._entry = file, entry

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._entry.shape)

    def __getitem__(self, index: Sequence[slice]) -> Tensor:
        first, last, _ = index[0].indices(self._entry.shape[0])
        width = math.prod(self._entry.shape[1:])
        rows = self._file._rows(self._entry, first * width, last * width)
        shape = [last - first, *self._entry.shape[1:]]
        return rows.view(shape)[(slice(None), *index[1:])]


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
