"""The sampler: the tokens of the rows of a global batch, as a pure function of the step.

Sample k of a run is window `permute(k % n)` of epoch `k // n`, a window being `seq_len + 1`
consecutive tokens at stride `seq_len`. It has no state, so a run resumes at any step, on any number
of ranks, with the same global batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.permutation import permute
from meshwright.data.view import TokenView
from meshwright.errors import DataError

IGNORE = -100
# The document that fills up a row of whole documents: padding, no data.
PADDING = -1


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a global batch: int64 [rows, seq_len] each.

    `targets` is the next token of each input, or `IGNORE` where that belongs to another document
    and packing is "documents". `segments` numbers the documents within each row from 0, with
    `PADDING` where a row is filled up; it is None where packing is "stream".
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    segments: NDArray[np.int64] | None


@dataclass(frozen=True)
class StepPosition:
    """The position of a step, for logs: that of its first sample.

    `epoch` is from 0, `sample` is within the epoch of `samples`, `tokens` were read before.
    """

    epoch: int
    sample: int
    samples: int
    tokens: int


class Sampler:
    """Global batches of `batch` sequences of `seq_len` tokens from a stream.

    `seed` and the epoch determine the order. `vocab_size` is a tighter bound of ids than the
    stream's (for a model with a smaller vocabulary). `name` is that of the stream, for messages.
    `samples` is the length of an epoch. Raises DataError for a stream shorter than one sample.
    """

    def __init__(
        self,
        view: TokenView,
        *,
        seq_len: int,
        batch: int,
        seed: int = 0,
        packing: Literal["stream", "documents"] = "stream",
        vocab_size: int | None = None,
        name: str = "train split",
    ) -> None:
        self.view = view
        self.seq_len = seq_len
        self.batch = batch
        self.seed = seed
        self.packing = packing
        self.vocab_size = vocab_size
        self.samples = (len(view) - 1) // seq_len
        if self.samples < 1:
            raise DataError(
                f"the {name} has {len(view)} tokens, one sample needs {seq_len + 1} "
                f"(seq_len = {seq_len})"
            )

    def windows(self, step: int, rows: range | slice | None = None) -> NDArray[np.int64]:
        """Return which window of the stream each row of a step is, int64 [rows]."""
        if step < 0:
            raise IndexError(f"step {step} is negative")
        first = step * self.batch
        return self._windows([first + row for row in chosen_rows(self.batch, rows)])

    def rows(self, step: int, rows: range | slice | None = None) -> Rows:
        """Return rows of the global batch of a step, by default all.

        Raises IndexError for rows outside the batch, and DataError naming file and token for an id
        outside the vocabulary and for rows of which every target is ignored.
        """
        return self._read(self.windows(step, rows))

    def read(self, samples: Sequence[int]) -> Rows:
        """Return samples by their numbers in the run; raises as `rows` does."""
        return self._read(self._windows(samples))

    def _windows(self, samples: Sequence[int]) -> NDArray[np.int64]:
        # Python integers until they are small: a far step times a large batch may pass 64 bits.
        pairs = [divmod(sample, self.samples) for sample in samples]
        indices = np.array([index for _, index in pairs], dtype=np.int64)
        out = np.empty_like(indices)
        for epoch in {epoch for epoch, _ in pairs}:
            in_epoch = np.array([epoch == sample_epoch for sample_epoch, _ in pairs])
            out[in_epoch] = permute(indices[in_epoch], self.samples, f"{self.seed}/{epoch}")
        return out

    def _read(self, windows: NDArray[np.int64]) -> Rows:
        starts = windows * self.seq_len
        ids = self.view.windows(starts, self.seq_len + 1, self.vocab_size)
        inputs, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
        if self.packing == "stream":
            return Rows(inputs, targets, None)
        documents = self._documents(starts)
        targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
        if targets.size and (targets == IGNORE).all():
            path, token = self.view.locate(int(starts[0]))
            raise DataError(
                f"every target from token {token} of {path.name} on is the first of another "
                f"document: there is nothing to learn from ({path.parent})"
            )
        return Rows(inputs, targets, np.ascontiguousarray(documents[:, :-1]))

    def position(self, step: int) -> StepPosition:
        """Return where the first sample of a step stands."""
        first = step * self.batch
        epoch, sample = divmod(first, self.samples)
        return StepPosition(epoch, sample, self.samples, first * self.seq_len)

    def _documents(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number the documents within each window from 0, int64 [rows, seq_len + 1]."""
        ends = self.view.ends
        lo = np.searchsorted(ends, starts, side="right")
        hi = np.searchsorted(ends, starts + self.seq_len, side="right")
        counts = hi - lo
        row = np.repeat(np.arange(len(starts)), counts)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        steps = np.zeros((len(starts), self.seq_len + 1), dtype=np.int64)
        steps[row, ends[lo[row] + nth] - starts[row]] = 1
        return np.cumsum(steps, axis=1)


def chosen_rows(batch: int, rows: range | slice | None) -> range:
    """Return the selected rows of a batch; raises IndexError for rows outside of it."""
    if rows is None:
        return range(batch)
    chosen = range(batch)[rows] if isinstance(rows, slice) else rows
    if len(chosen) and not (min(chosen) >= 0 and max(chosen) < batch):
        raise IndexError(f"rows {chosen} of a batch of {batch}")
    return chosen
