"""Shards of tensors in safetensors files, from which any region of the whole can be read.

A file holds what one rank wrote. Its header gives the position of each shard in the whole, in the
format of torch's distributed checkpoints (`DCP_SHARDING_INFO`), whose Hugging Face reader can read
these files unchanged. No pickle is involved, and a reader reads only the bytes that it needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from meshwright.checkpoint.commit import Fingerprint
from meshwright.checkpoint.ranged import RangedFile, ReadAhead, open_stored
from meshwright.errors import CheckpointError
from meshwright.parsing import parse_json
from meshwright.program.shards import Region, whole
from meshwright.store import Place, StorePath, beside
from meshwright.units import MIB, format_bytes

_DTYPES: Final = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE: Final = 8 * MIB  # hashed and written while it is in the processor's cache
_SYNCED: Final = 512 * MIB  # handed to the disk at once


class Chunk(NamedTuple):
    """A part of a named tensor: its offset along each dim, and its values."""

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor


def write_chunks(
    path: Place, chunks: Sequence[Chunk], mark: Callable[[str], None] = lambda moment: None
) -> Fingerprint:
    """Write chunks of different tensors as one safetensors file, synced; return size and hash.

    GPU tensors are copied to the host one chunk at a time. `mark` is called with "shard" halfway,
    and with "" whenever another part is on the disk or in the store. Raises `CheckpointError` with
    path and bytes if the disk refuses.
    """
    header = _header(chunks)
    total = len(header) + sum(chunk.tensor.nbytes for chunk in chunks)
    if isinstance(path, StorePath):
        return path.upload(
            lambda file: _write_pieces(file, header, chunks, mark, lambda: None), total
        )
    try:
        with path.open("xb", buffering=0) as file:
            written = _write_pieces(file, header, chunks, mark, lambda: os.fsync(file.fileno()))
            os.fsync(file.fileno())
            return written
    except OSError as error:
        size = path.stat().st_size if path.exists() else 0
        raise CheckpointError(
            f"{path} was not written: {error.strerror}, after {size} of {total} bytes "
            f"({format_bytes(total)})"
        ) from error


def _write_pieces(
    file: Any,
    header: bytes,
    chunks: Sequence[Chunk],
    mark: Callable[[str], None],
    sync: Callable[[], None],
) -> Fingerprint:
    """Write a header and chunks to an open file; `sync` hands to the disk what is written."""
    digest, unsynced, written = hashlib.sha256(), 0, 0
    for index, data in enumerate(chain([memoryview(header)], map(_bytes, chunks))):
        if index == (len(chunks) + 1) // 2:
            mark("shard")
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            digest.update(piece)
            _write(file, piece)
            written += len(piece)
            unsynced += len(piece)
            if unsynced >= _SYNCED:  # so that no wait for the disk is a long one
                sync()
                mark("")
                unsynced = 0
    return Fingerprint(written, digest.hexdigest())


def _write(file: Any, piece: memoryview) -> None:
    done = 0
    while done < len(piece):  # a raw write may take a part only
        done += file.write(piece[done:])


def _header(chunks: Sequence[Chunk]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for name, _, tensor in chunks:
        if name in entries:
            raise ValueError(f"two chunks of {name} in one file")
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    places = {chunk.name: {"saved_offsets": list(chunk.offsets)} for chunk in chunks}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    return struct.pack("<Q", len(text)) + text


def _bytes(chunk: Chunk) -> memoryview:
    flat = chunk.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


class _StoredPlace(NamedTuple):
    file: Any
    region: Region


class Stored:
    """The tensors in a set of files, of which any region can be read across their chunks."""

    def __init__(self, files: Iterable[Place]) -> None:
        self._places: dict[str, list[_StoredPlace]] = {}
        self._folder: Place = Path()
        self._ranged: list[RangedFile] = []
        for path, opened in _opened([*files]):
            self._folder = path.parent
            if isinstance(opened, RangedFile):
                self._ranged.append(opened)
            offsets = _offsets(opened, path)
            for name in opened.keys():  # noqa: SIM118 - not a dict
                shape = opened.get_slice(name).get_shape()
                start = offsets.get(name, [0] * len(shape))
                region = tuple(
                    (offset, offset + length) for offset, length in zip(start, shape, strict=True)
                )
                self._places.setdefault(name, []).append(_StoredPlace(opened, region))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        regions = [chunk.region for chunk in self._of(name)]
        return tuple(max(stop for _, stop in along) for along in zip(*regions, strict=True))

    def read(self, name: str, region: Region) -> Tensor:
        """Return a region of a tensor, in its stored dtype.

        Raises `CheckpointError` if the chunks do not cover it.
        """
        out, covered = torch.empty([stop - start for start, stop in region]), 0
        for chunk, common in self._parts(name, region):
            if not region:  # a number has no slices
                return cast(Tensor, chunk.file.get_tensor(name))
            values = chunk.file.get_slice(name)[_slices(common, chunk.region)]
            if values.numel() == out.numel():
                return cast(Tensor, values)
            out = out if covered else out.to(values.dtype)
            out[_slices(common, region)] = values
            covered += values.numel()
        if covered != out.numel():
            raise CheckpointError(
                f"{self._folder} holds {covered} of the {out.numel()} elements asked of {name}"
            )
        return out

    def read_ahead(self, requests: Iterable[tuple[str, Region]]) -> None:
        """Begin to read regions of tensors, which `read` will be asked for in this order.

        Only from a store, where requests take their time: see `ReadAhead`.
        """
        if not self._ranged:
            return
        ahead = ReadAhead(
            [
                chunk.file.span(name, _within(common[0], chunk.region[0]) if common else None)
                for name, region in requests
                for chunk, common in self._parts(name, region)
            ]
        )
        for file in self._ranged:
            file.take_from(ahead)

    def _parts(self, name: str, region: Region) -> Iterator[tuple[_StoredPlace, list[Any]]]:
        """Yield the chunks that a region of a tensor has elements in, and the region of those."""
        for chunk in self._of(name):
            common = [
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, chunk.region, strict=True)
            ]
            if all(start < stop for start, stop in common):
                yield chunk, common

    def whole(self, name: str) -> Tensor:
        """Return a whole tensor."""
        return self.read(name, whole(self.shape(name)))

    def _of(self, name: str) -> list[_StoredPlace]:
        if name not in self._places:
            raise CheckpointError(f"{self._folder} does not hold {name}")
        return self._places[name]


def _opened(paths: Sequence[Place]) -> Iterator[tuple[Place, Any]]:
    """Yield files and what they are open as; objects of a store are opened beside each other."""
    in_store = any(isinstance(path, StorePath) for path in paths)
    opened: Iterable[Any] = beside(open_stored, paths) if in_store else map(open_stored, paths)
    return zip(paths, opened, strict=True)


def _within(span: tuple[int, int], base: tuple[int, int]) -> tuple[int, int]:
    return span[0] - base[0], span[1] - base[0]


def _offsets(opened: Any, path: Place) -> Mapping[str, Sequence[int]]:
    """Return where each chunk of a file begins in the whole, as its header says."""
    text = (opened.metadata() or {}).get("DCP_SHARDING_INFO")
    if text is None:
        return {}
    try:
        return {name: list(entry["saved_offsets"]) for name, entry in parse_json(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} does not say where its shards lie") from error


def _slices(region: Sequence[tuple[int, int]], within: Region) -> tuple[slice, ...]:
    """Return the index of `region` in a tensor that holds the region `within`."""
    return tuple(
        slice(start - base, stop - base)
        for (start, stop), (base, _) in zip(region, within, strict=True)
    )
