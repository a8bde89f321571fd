"""The rows that a rank computes with, cut to microbatches and to its share of the sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.data.sampler import Rows


class Batch(NamedTuple):
    """Rows of this rank on its device: int64 `[rows, seq]`; segments only where packed.

    `keys` int64 `[rows]` are the rows' dropout keys, where the model drops.
    """

    inputs: Tensor
    targets: Tensor
    segments: Tensor | None = None
    keys: Tensor | None = None

    @classmethod
    def of(cls, rows: Rows, device: torch.device, keys: Tensor | None = None) -> Batch:
        """Return sampled rows as tensors on a device."""
        inputs, targets, segments = (
            None if part is None else torch.from_numpy(part).to(device, non_blocking=True)
            for part in (rows.inputs, rows.targets, rows.segments)
        )
        assert inputs is not None
        assert targets is not None
        return cls(inputs, targets, segments, None if keys is None else keys.to(device))

    def split(self, size: int) -> list[Batch]:
        """Return microbatches of `size` rows."""
        starts = range(0, len(self.inputs), size)
        return [self.rows(slice(start, start + size)) for start in starts]

    def rows(self, some: slice) -> Batch:
        """Return some of the rows."""
        return Batch(*(None if part is None else part[some] for part in self))  # type: ignore[arg-type]

    def at(self, positions: Tensor | None) -> Batch:
        """Return the inputs and targets at some positions; segments stay whole rows."""
        if positions is None:
            return self
        return self._replace(
            inputs=self.inputs[:, positions].contiguous(),
            targets=self.targets[:, positions].contiguous(),
        )
