"""The sequences that a rank computes, divided into microbatches and by sequence shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.data.sampler import Rows
from meshwright.kernels.varlen import bounds_of


class Batch(NamedTuple):
    """Sequences of this rank on its device; inputs, targets and segments are int64 `[rows, seq]`.

    `segments` (None unless packed) number each token's document, and `bounds` are the boundaries of
    these documents for varlen attention (`kernels.varlen`). `keys` int64 `[rows]` are dropout keys,
    None without dropout.
    """

    inputs: Tensor
    targets: Tensor
    segments: Tensor | None = None
    keys: Tensor | None = None
    bounds: Tensor | None = None

    @classmethod
    def of(cls, rows: Rows, keys: Tensor | None = None) -> Batch:
        """Wrap sampled sequences as host tensors, which share their memory."""
        inputs, targets = torch.from_numpy(rows.inputs), torch.from_numpy(rows.targets)
        if rows.segments is None:
            return cls(inputs, targets, None, keys)
        segments = torch.from_numpy(rows.segments)
        return cls(inputs, targets, segments, keys, bounds_of(segments))

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device; copies to a GPU are asynchronous, from pinned memory."""
        if device.type == "cuda":
            return self._each(lambda part: part.pin_memory().to(device, non_blocking=True))
        return self._each(lambda part: part.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(*(None if part is None else change(part) for part in self))  # type: ignore[arg-type]

    def split(self, size: int) -> list[Batch]:
        """Return microbatches of `size` sequences."""
        starts = range(0, len(self.inputs), size)
        return [self.rows(slice(start, start + size)) for start in starts]

    def rows(self, selection: slice) -> Batch:
        """Return a slice of the sequences."""
        return self._each(lambda part: part[selection])

    def at(self, positions: Tensor | None) -> Batch:
        """Return inputs and targets at `positions` of each sequence; segments remain whole.

        None: all positions.
        """
        if positions is None:
            return self
        return self._replace(
            inputs=self.inputs[:, positions].contiguous(),
            targets=self.targets[:, positions].contiguous(),
        )


class Feed:
    """Copies batches to a device; on a GPU on a separate stream, overlapping with the step.

    The loop requests a step's batch while the device computes the previous step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bring(self, batch: Batch) -> Batch:
        """Copy a host batch to the device; later work on the current stream waits for the copy."""
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            on_device = batch.to(self._device)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for part in on_device:
            if part is not None:  # its memory may be given anew once this stream is done with it
                part.record_stream(current)
        return on_device
