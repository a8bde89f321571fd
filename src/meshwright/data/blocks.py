"""A file's blocks, each compared with its checksum when it is first read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.files import BLOCK_BYTES, reading, sha256_bytes

_PIECES = 64  # of a file of which no checksums are known
_PIECE_BYTES = 1 << 16


class Blocks:
    """The content of a mapped file, and the CRC-32 of each of its blocks of `BLOCK_BYTES`.

    A file without these, from an older store, is one block, compared with its SHA-256.
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
        """Return which block of items `start` to `stop` is damaged; None if none is.

        A verified block is not read again.
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
    """Return a digest of a file's size and of 64 pieces spread over it.

    It distinguishes files without reading them completely, and may miss a changed bit.
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
