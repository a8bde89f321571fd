"""Memory-mapped token shards, their split into training and validation, and reading from them."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.permutation import permute
from meshwright.errors import DataError
from meshwright.files import BLOCK_BYTES, reading, sha256_bytes

_PIECES = 64  # of a file of which no checksums are known
_PIECE_BYTES = 1 << 16


class DamagedData(DataError):
    """Content that differs from its checksum; another read would not mend it."""


class Items(Protocol):
    """A sequence of numbers read by slices: an array, or a file of an object store."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> NDArray[Any]:
        """Return the items of a slice; may raise DamagedData."""


class Blocks:
    """The content of a mapped file with checksums: the CRC-32 of each block of `BLOCK_BYTES`.

    A file from an older store has none; it is one block, compared with its SHA-256.
    """

    def __init__(self, path: Path, items: NDArray[Any], blocks: Sequence[int], sha256: str) -> None:
        self.path = path
        self._bytes = items.view(np.uint8)
        self._width, self._sha256 = items.itemsize, sha256
        is_known = len(blocks) == -(-len(self._bytes) // BLOCK_BYTES)
        self._size = BLOCK_BYTES if is_known else max(1, len(self._bytes))
        self._blocks = tuple(blocks) if is_known else None
        self._good = bytearray(len(blocks) if is_known else 1)

    def problem(self, start: int, stop: int) -> str | None:
        """Return a line on the first damaged block within items `start` to `stop`, or None.

        A block is verified only once.
        """
        first, last = start * self._width // self._size, (stop * self._width - 1) // self._size
        for number in range(first, last + 1):
            if not self._good[number]:
                low = number * self._size
                content = self._bytes[low : low + self._size]
                if not self._is_good(number, content):
                    within = f"within bytes {low}-{low + len(content) - 1}"
                    return f"{self.path.name} is damaged {within}: its checksum differs"
                self._good[number] = 1
        return None

    def _is_good(self, number: int, content: NDArray[np.uint8]) -> bool:
        if self._blocks is None:
            return sha256_bytes(content.data) == self._sha256
        return zlib.crc32(content.data) == self._blocks[number]


def sampled_digest(path: Path) -> str:
    """Return a digest of a file's size and of 64 pieces spread over its content.

    It distinguishes large files without reading them completely, but can miss a changed bit.
    """
    with reading(path), path.open("rb") as file:
        file_bytes = path.stat().st_size
        pieces = [str(file_bytes).encode()]
        for number in range(_PIECES):
            file.seek(max(0, file_bytes - _PIECE_BYTES) * number // (_PIECES - 1))
            pieces.append(file.read(_PIECE_BYTES))
            if file_bytes <= _PIECE_BYTES:
                break
    return sha256_bytes(b"".join(pieces))


SPLIT_KEY = "split"


class Mask(NamedTuple):
    """The loss mask of a shard, uint8 [tokens] of 0 or 1, and the checksums of its file."""

    tokens: Items
    blocks: Blocks | None


@dataclass(frozen=True, eq=False)
class Shard:
    """One file of token ids, and the offsets at which its documents end, in tokens.

    `blocks` has the checksums of its content, if known. `mask` says which tokens are trained on;
    None means all.
    """

    path: Path
    tokens: Items
    ends: NDArray[np.int64]
    blocks: Blocks | None = None
    mask: Mask | None = None

    def read(self, start: int, stop: int) -> NDArray[np.integer]:
        """Return tokens `start` to `stop` in the file's dtype.

        Raises `DamagedData` if they are damaged.
        """
        self._check(self.blocks, start, stop)
        return self.tokens[start:stop]

    def read_mask(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the loss mask of tokens `start` to `stop`; raises `DamagedData` as `read`."""
        if self.mask is None:
            return np.ones(stop - start, dtype=np.uint8)
        self._check(self.mask.blocks, start, stop)
        return self.mask.tokens[start:stop]

    def _check(self, blocks: Blocks | None, start: int, stop: int) -> None:
        if blocks is not None and (problem := blocks.problem(start, stop)):
            raise DamagedData(
                f"{problem} ({self.path.parent}). Restore the file, or remove the folder and "
                "prepare it again"
            )


_Read = Callable[[Shard, int, int], NDArray[Any]]


def map_array(path: Path, dtype: str, count: int, offset: int = 0) -> NDArray[Any]:
    """Map `count` items of a file, from byte `offset`, into memory read-only.

    The caller must have checked the size of the file.
    """
    if count == 0:
        return np.empty(0, dtype=dtype)
    with reading(path), path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(content, dtype=dtype, count=count, offset=offset)


class TokenView:
    """A sequence of tokens made of ranges of shards, read by position.

    `ranges`, int64 [n, 3], has each range's shard index and its first and past-the-last token.
    `ends` has the positions at which documents end. Ids that are read must be below `vocab_size`.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        ranges: NDArray[np.int64],
        ends: NDArray[np.int64],
        vocab_size: int,
    ) -> None:
        self.ends = ends
        self.vocab_size = vocab_size
        self._shards = tuple(shards)
        self._ranges = ranges
        stops = np.cumsum(ranges[:, 2] - ranges[:, 1])
        self._begins = stops - (ranges[:, 2] - ranges[:, 1])
        self._length = int(stops[-1]) if len(stops) else 0

    def __len__(self) -> int:
        return self._length

    @property
    def documents(self) -> int:
        """The number of documents; one that the split divides counts on both sides."""
        return len(self.ends)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the checked ids at positions `start` to `stop`, int64 [stop - start]."""
        ids: NDArray[np.int64] = self.windows(np.array([start], dtype=np.int64), stop - start)[0]
        return ids

    def windows(
        self, starts: NDArray[np.int64], length: int, vocab_size: int | None = None
    ) -> NDArray[np.int64]:
        """Return the ids of a window of `length` tokens at each start, int64 [n, length].

        Raises DataError with file and token for an id not in [0, vocabulary), and with file and
        bytes for damaged content.
        """
        out = self._gather(starts, length, Shard.read, np.int64)
        limit = min(self.vocab_size, vocab_size or self.vocab_size)
        if out.size and (out.max() >= limit or out.min() < 0):
            self._refuse(out, starts, limit)
        return out

    def read_mask(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return the loss mask of positions `start` to `stop`, bool [stop - start]."""
        starts = np.array([start], dtype=np.int64)
        mask: NDArray[np.bool_] = self._gather(starts, stop - start, Shard.read_mask, np.bool_)[0]
        return mask

    def _gather(
        self, starts: NDArray[np.int64], length: int, read: _Read, dtype: type[np.generic]
    ) -> NDArray[Any]:
        """Return what `read` returns of a window of `length` tokens at each start, [n, length]."""
        if len(starts) and (starts.min() < 0 or starts.max() + length > self._length):
            raise IndexError(f"a window leaves the stream of {self._length} tokens")
        out = np.empty((len(starts), length), dtype=dtype)
        pieces = np.searchsorted(self._begins, starts, side="right") - 1
        for row, (start, piece) in enumerate(zip(starts.tolist(), pieces.tolist(), strict=True)):
            filled = 0
            while filled < length:
                shard, first, stop = self._ranges[piece].tolist()
                first += start + filled - int(self._begins[piece])
                count = min(length - filled, stop - first)
                out[row, filled : filled + count] = read(self._shards[shard], first, first + count)
                filled += count
                piece += 1
        return out

    def locate(self, position: int) -> tuple[Path, int]:
        """Return the file of a position, and the index of the token in that file."""
        piece = int(np.searchsorted(self._begins, position, side="right")) - 1
        shard, first, _ = self._ranges[piece].tolist()
        return self._shards[shard].path, first + position - int(self._begins[piece])

    def _refuse(self, ids: NDArray[np.int64], starts: NDArray[np.int64], limit: int) -> None:
        row, column = np.argwhere((ids < 0) | (ids >= limit))[0].tolist()
        path, token = self.locate(int(starts[row]) + column)
        raise DataError(
            f"id {ids[row, column]} at token {token} of {path.name}, vocabulary is {limit} "
            f"({path.parent})"
        )


def split(
    shards: Sequence[Shard], share: float, vocab_size: int, *, divides: bool = True
) -> tuple[TokenView, TokenView]:
    """Return the training tokens and the validation tokens; the latter are empty for a share of 0.

    Which documents are held out depends only on their number and the share, not on the run's seed:
    the first ones of a fixed pseudo-random permutation. Holding out the end of the corpus would
    fail for alphabetical order, and every k-th document for periodic patterns. If the share is less
    than one document, a whole document could be far more than the share (half of two books), so the
    last tokens are held out, dividing a document. If `divides` is False, one document is held out
    instead.
    """
    if not 0 <= share < 1:
        raise DataError(f"validation = {share}: must be in [0, 1)")
    lengths = np.concatenate([np.diff(shard.ends, prepend=0) for shard in shards])
    total, count = int(lengths.sum()), len(lengths)
    held_out = int(count * share)
    if share and not divides and count > 1:
        held_out = max(1, held_out)
    if share and held_out == 0:
        cut = total - max(1, round(total * share))
        if cut < 1:
            raise DataError(f"a corpus of {total} tokens cannot be split (validation = {share})")
        return _by_tokens(shards, cut, vocab_size)
    mask = np.zeros(count, dtype=bool)
    mask[permute(np.arange(held_out, dtype=np.int64), count, SPLIT_KEY)] = True
    return _by_mask(shards, lengths, ~mask, vocab_size), _by_mask(shards, lengths, mask, vocab_size)


def _by_mask(
    shards: Sequence[Shard], lengths: NDArray[np.int64], mask: NDArray[np.bool_], vocab_size: int
) -> TokenView:
    """Return a view of the documents in the mask; adjacent ones are joined into one range.

    `lengths` and `mask` have one element per document of all shards.
    """
    rows = []
    position = 0
    for index, shard in enumerate(shards):
        inside = mask[position : position + len(shard.ends)].astype(np.int8)
        position += len(shard.ends)
        edges = np.diff(inside, prepend=0, append=0)
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), shard.ends])
        starts, stops = offsets[edges == 1], offsets[edges == -1]
        rows.append(np.stack([np.full(len(starts), index, dtype=np.int64), starts, stops], axis=1))
    return TokenView(shards, np.concatenate(rows), np.cumsum(lengths[mask]), vocab_size)


def _by_tokens(shards: Sequence[Shard], cut: int, vocab_size: int) -> tuple[TokenView, TokenView]:
    """Return views of the first `cut` tokens and of the others."""
    sizes = np.array([len(shard.tokens) for shard in shards], dtype=np.int64)
    begins = np.cumsum(sizes) - sizes
    ends = np.concatenate([shard.ends + begin for shard, begin in zip(shards, begins, strict=True)])
    index = np.arange(len(shards), dtype=np.int64)
    head_sizes = np.clip(cut - begins, 0, sizes)
    head = np.stack([index, np.zeros_like(head_sizes), head_sizes], axis=1)[head_sizes > 0]
    tail = np.stack([index, head_sizes, sizes], axis=1)[head_sizes < sizes]
    head_ends = np.concatenate([ends[ends < cut], np.array([cut], dtype=np.int64)])
    return (
        TokenView(shards, head, head_ends, vocab_size),
        TokenView(shards, tail, ends[ends > cut] - cut, vocab_size),
    )
