"""The sampler: the token ids of the rows of a global batch, as a pure function of the step.

Sample k of a run is window `permute(k % n)` of epoch `k // n`, where n windows of `seq_len + 1`
consecutive tokens start every `seq_len` tokens. There is no state, so a run resumes at any step, on
any number of ranks, with the same global batches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.permutation import permute
from meshwright.data.view import DamagedData, TokenView
from meshwright.errors import DataError

# Reads rows of the global batch of a step.
ReadRows = Callable[[int, range], "Rows"]
IGNORE = -100
# The document that fills up a row of whole documents: padding, no data.
PADDING = -1


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a global batch, each field int64 [rows, seq_len].

    `targets` is the next token of each input, or `IGNORE` where that token belongs to another
    document and packing is "documents". `segments` numbers the documents within each row from 0,
    with `PADDING` at padding tokens; it is None if packing is "stream". `left_out` says for each
    row that could not be read which block of its data is damaged: it has no targets.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    segments: NDArray[np.int64] | None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepPosition:
    """The position in the data of a step's first sample, for logs.

    `epoch` counts from 0, `sample` is its number within the epoch of `samples` samples, and
    `tokens` is how many tokens all earlier steps read.
    """

    epoch: int
    sample: int
    samples: int
    tokens: int


class Sampler:
    """Global batches of `batch` sequences of `seq_len` tokens from a `TokenView`.

    `seed` and the epoch determine the order. `vocab_size` is a bound on ids below that of the view,
    for a model with a smaller vocabulary. `name` names the data in messages. With `skips`, a row of
    damaged data is left out, else it raises. `samples` is the number of samples in an epoch. Raises
    DataError if there are fewer tokens than one sample has.
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
        skips: bool = False,
        name: str = "train split",
    ) -> None:
        self.view = view
        self.skips = skips
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
        """Return the index of the window of tokens that each row of a step is, int64 [rows]."""
        if step < 0:
            raise IndexError(f"step {step} is negative")
        first = step * self.batch
        return self._windows([first + row for row in chosen_rows(self.batch, rows)])

    def rows(self, step: int, rows: range | slice | None = None) -> Rows:
        """Return rows of the global batch of a step; None means all rows.

        Raises IndexError for rows outside the batch. Raises DataError, with file and token, for an
        id outside the vocabulary, and for rows in which every target is ignored; DamagedData for
        content that differs from its checksum, unless such rows are left out.
        """
        return self._read(self.windows(step, rows))

    def read(self, samples: Sequence[int]) -> Rows:
        """Return samples given by their numbers, counted over all epochs; raises as `rows` does."""
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
        """Return the rows of windows given by their index; those of damaged data as they say."""
        try:
            rows = self._intact(windows)
        except DamagedData:
            if not self.skips:
                raise
            rows = joined([self._one(windows[row : row + 1]) for row in range(len(windows))])
        if rows.targets.size and not rows.left_out and (rows.targets == IGNORE).all():
            path, token = self.view.locate(int(windows[0]) * self.seq_len)
            raise DataError(
                f"every target from token {token} of {path.name} on is the first of another "
                f"document: there is nothing to learn from ({path.parent})"
            )
        return rows

    def _one(self, window: NDArray[np.int64]) -> Rows:
        """Return the row of one window, or one of zeros without targets if it is damaged."""
        try:
            return self._intact(window)
        except DamagedData as error:
            inputs = np.zeros((1, self.seq_len), dtype=np.int64)
            segments = None if self.packing == "stream" else np.zeros_like(inputs)
            return Rows(inputs, np.full_like(inputs, IGNORE), segments, (str(error),))

    def _intact(self, windows: NDArray[np.int64]) -> Rows:
        """Return the rows of windows; raises DamagedData if one cannot be read."""
        starts = windows * self.seq_len
        ids = self.view.windows(starts, self.seq_len + 1, self.vocab_size)
        inputs, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
        if self.packing == "stream":
            return Rows(inputs, targets, None)
        documents = self._documents(starts)
        targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
        return Rows(inputs, targets, np.ascontiguousarray(documents[:, :-1]))

    def position(self, step: int) -> StepPosition:
        """Return the position in the data of a step's first sample."""
        first = step * self.batch
        epoch, sample = divmod(first, self.samples)
        return StepPosition(epoch, sample, self.samples, first * self.seq_len)

    def _documents(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each token's document number in its window, int64 [rows, seq_len + 1]."""
        ends = self.view.ends
        lo = np.searchsorted(ends, starts, side="right")
        hi = np.searchsorted(ends, starts + self.seq_len, side="right")
        counts = hi - lo
        row = np.repeat(np.arange(len(starts)), counts)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        steps = np.zeros((len(starts), self.seq_len + 1), dtype=np.int64)
        steps[row, ends[lo[row] + nth] - starts[row]] = 1
        return np.cumsum(steps, axis=1)


def joined(parts: Sequence[Rows]) -> Rows:
    """Return rows one below the other; all parts have segments, or none has."""
    segments = [part.segments for part in parts if part.segments is not None]
    return Rows(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate(segments) if segments else None,
        tuple(line for part in parts for line in part.left_out),
    )


def chosen_rows(batch: int, rows: range | slice | None) -> range:
    """Return the selected rows of a batch as a range; None selects all.

    Raises IndexError for rows outside the batch.
    """
    if rows is None:
        return range(batch)
    chosen = range(batch)[rows] if isinstance(rows, slice) else rows
    if len(chosen) and not (min(chosen) >= 0 and max(chosen) < batch):
        raise IndexError(f"rows {chosen} of a batch of {batch}")
    return chosen


class WholeSampler(Sampler):
    """Global batches whose rows are packed with whole documents, which attend only to themselves.

    A row has `seq_len + 1` tokens, the last of which is only a target. Documents are packed once,
    the longest first, each into the fullest row with enough space (best-fit decreasing;
    arXiv:2404.10830, section 3); each epoch has another order of rows. The end of a row is padded
    with zeros. Targets are `IGNORE` between documents, in padding, and where the loss mask is 0.

    A document longer than a row is truncated, see `facts`. If truncation leaves nothing to train
    on, the document is dropped if `skips`; otherwise this raises DataError with its number.
    """

    def __init__(
        self,
        view: TokenView,
        *,
        seq_len: int,
        batch: int,
        seed: int = 0,
        skips: bool = False,
        name: str = "train split",
    ) -> None:
        self.view, self.seq_len, self.batch, self.seed = view, seq_len, batch, seed
        self.packing, self.vocab_size, self.skips = "documents", None, skips
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), view.ends])
        lengths = np.diff(self._starts)
        self._lengths = np.minimum(lengths, seq_len + 1)
        self._cut = lengths > seq_len + 1
        self._tokens_cut = int((lengths - self._lengths).sum())
        self._left_out = [
            document
            for document in np.flatnonzero(self._cut).tolist()
            if not self._is_trained(document)
        ]
        if self._left_out and not skips:
            raise DataError(
                f"conversation {self._left_out[0] + 1} of the {name} has no token that is trained "
                f"among its first {seq_len + 1} (train.seq_len = {seq_len}), as have "
                f"{len(self._left_out) - 1} others. Raise train.seq_len, or leave them out: "
                "data.on_error = 'skip'"
            )
        usable = np.ones(len(lengths), dtype=bool)
        usable[self._left_out] = False
        if not usable.any():
            raise DataError(f"the {name} has no conversation")
        self._rows = best_fit(self._lengths, np.flatnonzero(usable), seq_len + 1)
        self.samples = len(self._rows)

    def facts(self) -> dict[str, Any]:
        """Return the numbers of packed, truncated and dropped conversations and of tokens cut off.

        `fill` is the fraction of all rows' tokens that are not padding.
        """
        conversations = sum(map(len, self._rows))
        used = sum(int(self._lengths[row].sum()) for row in self._rows)
        return {
            "conversations": conversations,
            "cut": int(self._cut.sum()) - len(self._left_out),
            "tokens_cut": self._tokens_cut,
            "left_out": len(self._left_out),
            "fill": used / (self.samples * (self.seq_len + 1)),
        }

    def _is_trained(self, document: int) -> bool:
        start = int(self._starts[document])
        try:
            return bool(self.view.read_mask(start + 1, start + self.seq_len + 1).any())
        except DamagedData:  # its row is left out when it is read
            if not self.skips:
                raise
            return True

    def _intact(self, windows: NDArray[np.int64]) -> Rows:
        rows = [self._row(self._rows[window]) for window in windows.tolist()]
        inputs, targets, segments = (np.stack(parts) for parts in zip(*rows, strict=True))
        return Rows(inputs, targets, segments)

    def _row(self, documents: Sequence[int]) -> tuple[NDArray[np.int64], ...]:
        parts = []
        for document in documents:
            start = int(self._starts[document])
            stop = start + int(self._lengths[document])
            parts.append((self.view.read(start, stop), self.view.read_mask(start, stop)))
        return filled_row(parts, self.seq_len)


def filled_row(
    documents: Sequence[tuple[NDArray[Any], NDArray[np.bool_]]], seq_len: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the inputs, targets and segments of one row of packed documents, each int64 [seq_len].

    Each document is a pair of its ids and its loss mask. Padding is 0 in the inputs, `IGNORE` in
    the targets and `PADDING` in the segments.
    """
    ids = np.zeros(seq_len + 1, dtype=np.int64)
    trained = np.zeros(seq_len + 1, dtype=bool)
    segments = np.full(seq_len + 1, PADDING, dtype=np.int64)
    filled = 0
    for number, (document_ids, mask) in enumerate(documents):
        part = slice(filled, filled + len(document_ids))
        ids[part], trained[part], segments[part] = document_ids, mask, number
        trained[filled] = False  # the first token of a document is not predicted
        filled += len(document_ids)
    targets = np.where(trained[1:], ids[1:], IGNORE)
    return ids[:-1].copy(), targets, segments[:-1].copy()


def best_fit(
    lengths: NDArray[np.int64], documents: NDArray[np.int64], capacity: int
) -> list[list[int]]:
    """Return the rows of documents for best-fit-decreasing bin packing.

    Each row is a list of document indices, from `documents`, whose `lengths` add up to at most
    `capacity` tokens.
    """
    rows: list[list[int]] = []
    spaces: list[int] = []  # the free spaces of rows, sorted
    rows_with: dict[int, list[int]] = {}
    order = documents[np.argsort(-lengths[documents], kind="stable")]
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        index = bisect_left(spaces, length)
        if index == len(spaces):
            row, space = len(rows), capacity
            rows.append([])
        else:
            space = spaces[index]
            row = rows_with[space].pop()
            if not rows_with[space]:
                spaces.pop(index)
        rows[row].append(document)
        left = space - length
        if left:
            if not rows_with.setdefault(left, []):
                insort(spaces, left)
            rows_with[left].append(row)
    return rows
