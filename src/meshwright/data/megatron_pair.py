"""Megatron's `.bin`/`.idx` pair of files, memory-mapped for reading, and written.

The index (little endian): magic, version 1, code of the token type, number of sequences, length of
the document index; then the sizes of the sequences (int32, tokens), where each starts (int64,
bytes), and the document index (int64: the first sequence of each document, and the end).

The format has no checksums. `write_megatron` stores them beside the pair, in PREFIX.seal.json, and
reading verifies them; pairs from elsewhere lack this file.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.view import Blocks, Shard, map_array, sampled_digest
from meshwright.errors import DataError, refusal
from meshwright.files import AtomicFile, FileHash, reading, sha256_bytes, write_atomic
from meshwright.parsing import foreign, parse_json

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_LARGEST = 2**31 - 1  # a token, or the tokens of a document
_AT_ONCE = 2**22  # tokens that are copied at a time
SEAL = ".seal.json"
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class _Record(NamedTuple):
    """The size and checksums of a file of a pair when it was written."""

    bytes: int
    sha256: str
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class MegatronPair:
    """An opened pair: its tokens as a shard, and the digests of its files by path.

    The digest of the token file covers only its size and a sample of its content, because reading
    all would take too long.
    """

    shard: Shard
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """A digest of both files."""
        return sha256_bytes("\n".join(self.files.values()).encode())


def megatron_prefix(path: Path) -> Path | None:
    """Return the path prefix of a pair, given it or either file; None if no index exists."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    # Not `Path.is_file`, which raises if the name with the suffix is too long.
    return prefix if os.path.isfile(_with(prefix, ".idx")) else None


def open_megatron(prefix: Path) -> MegatronPair:
    """Open the pair PREFIX.bin and PREFIX.idx, with the tokens memory-mapped.

    Raises DataError, with the file and both values, if a size does not match, if sequences or
    documents are out of order, overlap or exceed the file, or if the checksums in PREFIX.seal.json
    are those of another index.
    """
    seal = _read_seal(prefix)
    index_path, tokens_path = _with(prefix, ".idx"), _with(prefix, ".bin")
    with reading(index_path):
        content = index_path.read_bytes()
    with reading(tokens_path):
        token_bytes = tokens_path.stat().st_size
    if seal is not None and sha256_bytes(content) != seal[".idx"].sha256:
        raise _other(prefix, index_path)
    dtype, sizes, pointers, documents = _parse(index_path, content)
    width = np.dtype(dtype).itemsize
    stops = np.cumsum(sizes, dtype=np.int64)
    wrong = np.flatnonzero(pointers != (stops - sizes) * width)
    if len(wrong):
        first = int(wrong[0])
        expected = int((stops - sizes)[first]) * width
        raise DataError(
            f"{index_path}: sequence {first} starts at byte {pointers[first]}, but the sequences "
            f"before it end at byte {expected}"
        )
    total = int(stops[-1]) if len(stops) else 0
    if token_bytes != total * width:
        raise DataError(
            f"{tokens_path} has {token_bytes} bytes, its index says {total * width} "
            f"({total} tokens of {width} bytes)"
        )
    ends = np.concatenate([np.zeros(1, dtype=np.int64), stops])[documents[1:]]
    ends = np.unique(ends[ends > 0])  # documents without tokens vanish
    if not total:
        raise DataError(f"the corpus is empty: {tokens_path}")
    tokens = map_array(tokens_path, dtype, total)
    blocks = None
    if seal is not None:
        record = seal[".bin"]
        if record.bytes != token_bytes:
            raise _other(prefix, tokens_path)
        blocks = Blocks(tokens_path, tokens, record.blocks, record.sha256)
    shard = Shard(tokens_path, tokens, ends, blocks)
    files = {str(index_path): sha256_bytes(content), str(tokens_path): sampled_digest(tokens_path)}
    return MegatronPair(shard, files)


def write_megatron(prefix: Path, shards: Sequence[Shard], vocab_size: int) -> int:
    """Write shards as the pair PREFIX.bin and PREFIX.idx, one sequence per document.

    Tokens are uint16 if the vocabulary allows, else int32, as in Megatron. The index is written
    last, so a pair that has an index is complete. Returns the number of tokens. Raises `DataError`
    if a file already exists, or if a document is too long for the index.
    """
    index_path, tokens_path = _with(prefix, ".idx"), _with(prefix, ".bin")
    for path in (index_path, tokens_path, _with(prefix, SEAL)):
        if path.exists():
            raise DataError(f"{path} is there already: name another pair, or remove it")
    code = 8 if vocab_size <= 2**16 else 4
    dtype = np.dtype(DTYPES[code])
    with AtomicFile(tokens_path) as tokens:
        for shard in shards:
            for start in range(0, len(shard.tokens), _AT_ONCE):
                tokens.write(
                    shard.read(start, min(start + _AT_ONCE, len(shard.tokens)))
                    .astype(dtype)
                    .tobytes()
                )
    sizes = np.concatenate([np.diff(shard.ends, prepend=0) for shard in shards])
    if sizes.max(initial=0) > _LARGEST:
        raise DataError(f"a document of {sizes.max()} tokens does not fit into a Megatron index")
    stops = np.cumsum(sizes, dtype=np.int64)
    parts = [
        HEADER.pack(MAGIC, VERSION, code, len(sizes), len(sizes) + 1),
        sizes.astype("<i4").tobytes(),
        ((stops - sizes) * dtype.itemsize).astype("<i8").tobytes(),
        np.arange(len(sizes) + 1, dtype="<i8").tobytes(),
    ]
    with AtomicFile(index_path) as index:
        for part in parts:
            index.write(part)
        _write_seal(prefix, {".bin": tokens.hash, ".idx": index.hash})
    return int(stops[-1]) if len(stops) else 0


def _write_seal(prefix: Path, hashes: Mapping[str, FileHash]) -> None:
    body = {
        suffix: {"bytes": file_hash.size, "sha256": file_hash.sha256, "blocks": file_hash.blocks}
        for suffix, file_hash in hashes.items()
    }
    write_atomic(_with(prefix, SEAL), (json.dumps(body, indent=1) + "\n").encode())


def _read_seal(prefix: Path) -> Mapping[str, _Record] | None:
    """Return the sizes and checksums in PREFIX.seal.json by suffix; None if the file is missing."""
    path = _with(prefix, SEAL)
    if not os.path.isfile(path):
        return None
    with reading(path):
        text = path.read_bytes()
    with foreign(str(path), DataError):
        body = parse_json(text)
        records = {}
        for suffix in (".bin", ".idx"):
            entry = body[suffix]
            records[suffix] = _Record(
                int(entry["bytes"]), str(entry["sha256"]), tuple(entry["blocks"])
            )
            if any(type(crc) is not int for crc in records[suffix].blocks):
                raise ValueError("a checksum that is not an integer")
    return records


def _other(prefix: Path, path: Path) -> DataError:
    seal = _with(prefix, SEAL)
    hint = f"Restore the file; if the pair was made anew by another program, remove {seal}"
    return DataError(refusal(f"{path} is not what {seal} says: it is damaged", hint=hint))


def _parse(
    path: Path, content: bytes
) -> tuple[str, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the token dtype, sequence sizes, start bytes and document index of an index file."""
    if len(content) < HEADER.size or not content.startswith(MAGIC):
        raise DataError(f"{path} is not a Megatron index: it starts with {content[:9]!r}")
    _, version, code, sequences, documents = HEADER.unpack_from(content)
    if version != VERSION:
        raise DataError(f"{path} has index version {version}; only {VERSION} is known")
    if code not in DTYPES:
        raise DataError(f"{path} has token type {code}, which is not one of integers")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if len(content) != expected:
        raise DataError(
            f"{path} has {len(content)} bytes, its header says {expected} "
            f"({sequences} sequences, {documents} document offsets)"
        )
    sizes = np.frombuffer(content, "<i4", sequences, HEADER.size).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", sequences, HEADER.size + 4 * sequences)
    starts = np.frombuffer(content, "<i8", documents, HEADER.size + 12 * sequences)
    if len(sizes) and sizes.min() < 0:
        raise DataError(f"{path}: sequence {int(sizes.argmin())} has {sizes.min()} tokens")
    ordered = len(starts) > 0 and starts[0] == 0 and starts[-1] == sequences
    if not ordered or (np.diff(starts) < 0).any():
        raise DataError(
            f"{path}: the document index must rise from 0 to {sequences} (the sequences), it is "
            f"{starts[:3].tolist()}...{starts[-3:].tolist()}"
        )
    return DTYPES[code], sizes, pointers.astype(np.int64), starts.astype(np.int64)


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)
