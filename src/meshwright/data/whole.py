"""Samples of whole conversations: which of them share a row, and what of a row is trained."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.sampler import IGNORE, PADDING, Rows, Sampler
from meshwright.data.view import TokenView
from meshwright.errors import DataError


class WholeSampler(Sampler):
    """Global batches of rows that hold whole documents, which attend to themselves only.

    A row has room for `seq_len + 1` tokens, the last of them a target only. Documents are put into
    rows once, the longest first, each into the fullest row that has room for it (best-fit
    decreasing; arXiv:2404.10830, section 3); the rows come in another order in each epoch. What is
    left of a row is padded with zeros. Targets are `IGNORE` where they are not
    trained, by the mask of the stream, and between documents.

    A document that is longer than a row is cut, see `facts`. One of which nothing that is trained
    is left is left out where `skips`; else it raises DataError with its number.
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
        self.packing, self.vocab_size = "documents", None
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
        """Return how many conversations there are, were cut and were left out, and tokens cut off.

        `fill` is the share of a row that is conversations.
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
        return bool(self.view.read_mask(start + 1, start + self.seq_len + 1).any())

    def _read(self, windows: NDArray[np.int64]) -> Rows:
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
    """Return inputs, targets and segments of a row, int64 `[seq_len]` each.

    Of each document come its ids and which of them are trained; what is left of the row is zeros,
    and `PADDING` in the segments.
    """
    ids = np.zeros(seq_len + 1, dtype=np.int64)
    trained = np.zeros(seq_len + 1, dtype=bool)
    segments = np.full(seq_len + 1, PADDING, dtype=np.int64)
    filled = 0
    for number, (document_ids, mask) in enumerate(documents):
        part = slice(filled, filled + len(document_ids))
        ids[part], trained[part], segments[part] = document_ids, mask, number
        trained[filled] = False  # it follows nothing that it could be told from
        filled += len(document_ids)
    targets = np.where(trained[1:], ids[1:], IGNORE)
    return ids[:-1].copy(), targets, segments[:-1].copy()


def best_fit(
    lengths: NDArray[np.int64], documents: NDArray[np.int64], capacity: int
) -> list[list[int]]:
    """Return rows of documents, each of at most `capacity` tokens: best-fit decreasing."""
    rows: list[list[int]] = []
    spaces: list[int] = []  # those that some row has, in order
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
