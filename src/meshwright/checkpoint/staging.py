"""Copies from a GPU to host memory through a limited amount of pinned memory.

All processes share pinned memory, and torch rounds each allocation up to a power of two and keeps
it. So two buffers of fixed size alternate: while the GPU fills one, the host copies the other to
ordinary memory.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from meshwright.units import MIB

PIECE: Final = 64 * MIB


class Staging:
    """Copies GPU tensors to the host on a stream, through at most two pinned buffers."""

    def __init__(self, stream: Any, piece: int = PIECE, *, pins: bool = True) -> None:
        """Set the `torch.cuda.Stream` to copy on; buffers are allocated by the first copy."""
        self._stream, self._piece, self._pins = stream, piece, pins
        self._pieces: list[Tensor] = []
        self._filled: dict[int, tuple[Any, Tensor]] = {}  # until when, and where its bytes belong
        self._turn = 0

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Start to copy `source` to the host tensor `into` of the same shape; `finish` waits for
        it.
        """
        source_bytes, destination_bytes = (
            x.contiguous().view(-1).view(torch.uint8) for x in (source, into)
        )
        assert destination_bytes.data_ptr() == into.data_ptr(), "what is copied into is contiguous"
        for start in range(0, len(source_bytes), self._piece):
            buffer_index = self._turn % 2
            self._turn += 1
            self._empty(buffer_index)
            piece = source_bytes[start : start + self._piece]
            buffer = self._room(buffer_index)[: len(piece)]
            buffer.copy_(piece, non_blocking=True)
            self._filled[buffer_index] = (
                self._stream.record_event(),
                destination_bytes[start : start + len(piece)],
            )

    def finish(self) -> None:
        """Wait until all copies are done."""
        for buffer_index in sorted(self._filled, key=lambda index: (index - self._turn) % 2):
            self._empty(buffer_index)

    def _room(self, index: int) -> Tensor:
        while len(self._pieces) <= index:
            buffer = torch.empty(self._piece, dtype=torch.uint8, pin_memory=self._pins)
            self._pieces.append(buffer)
        return self._pieces[index]

    def _empty(self, index: int) -> None:
        """Copy a pinned buffer to its destination, once the GPU has filled it."""
        filled = self._filled.pop(index, None)
        if filled is not None:
            arrived, into = filled
            arrived.synchronize()
            into.copy_(self._pieces[index][: len(into)])
