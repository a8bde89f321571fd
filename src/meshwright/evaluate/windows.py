"""Sliding windows over a stream of tokens: which tokens each row reads, and which it scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data import IGNORE, PADDING, Rows
from meshwright.data.permutation import permute
from meshwright.data.view import TokenView
from meshwright.errors import ConfigError, refusal


@dataclass(frozen=True)
class Windows:
    """Rows of at most `seq_len` inputs, each `stride` tokens after the one before.

    Every token but the first is the target of exactly one row, the first that reaches it: where
    rows overlap, the second scores what the first has not, with up to `seq_len` tokens before it.
    The last one ends with the stream. These are the windows of
    huggingface.co/docs/transformers/perplexity with a `max_length` of `seq_len + 1`.

    Full rows come in the order in which a run with the seed reads them, so that the first of them
    are a sample of the text; with a stride of `seq_len` they are those of the run's evaluation.
    With packing "documents" attention stays inside a document, and its first token is no target.
    """

    view: TokenView
    seq_len: int
    stride: int
    packing: Literal["stream", "documents"] = "stream"
    seed: int = 0

    @property
    def full(self) -> int:
        """How many rows have `seq_len` inputs."""
        return max(0, (len(self.view) - 1 - self.seq_len) // self.stride + 1)

    def __len__(self) -> int:
        covered = 0 if self.full == 0 else (self.full - 1) * self.stride + self.seq_len
        return self.full + (covered < len(self.view) - 1)

    def scored(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the range of tokens that each of some rows scores, int64 `[rows, 2]`."""
        starts = self._starts(first, stop)
        begins = starts + 1 + np.where(starts == 0, 0, self.seq_len - self.stride)
        ends = np.minimum(starts + self.seq_len, len(self.view) - 1) + 1
        return np.stack([begins, ends], axis=1)

    def rows(self, first: int, stop: int) -> Rows:
        """Return rows `first` to `stop`, padded on the right; targets not scored are `IGNORE`.

        Raises DataError for an id outside of the vocabulary.
        """
        starts, scored = self._starts(first, stop), self.scored(first, stop)
        length = int((scored[:, 1] - starts).max())
        at = starts[:, None] + np.arange(length)
        inside = np.minimum(at, len(self.view) - 1)
        ids, trained = np.zeros_like(at), np.zeros(at.shape, dtype=bool)
        for row, (start, end) in enumerate(zip(starts, scored[:, 1], strict=True)):
            ids[row, : end - start] = self.view.read(int(start), int(end))
            trained[row, : end - start] = self.view.read_mask(int(start), int(end))
        targets = ids[:, 1:].copy()
        targets[(at[:, 1:] < scored[:, :1]) | (at[:, 1:] >= scored[:, 1:])] = IGNORE
        targets[~trained[:, 1:]] = IGNORE
        if self.packing == "stream":
            return Rows(ids[:, :-1], targets, None)
        documents = np.searchsorted(self.view.ends, inside, side="right")
        documents -= documents[:, :1]
        targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
        documents[at >= scored[:, 1:] - 1] = PADDING  # also the last token, which is a target only
        return Rows(ids[:, :-1], targets, documents[:, :-1])

    def lengths(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return how many inputs each of some rows has without what pads it, int64 `[rows]`."""
        return self.scored(first, stop)[:, 1] - self._starts(first, stop) - 1

    def _starts(self, first: int, stop: int) -> NDArray[np.int64]:
        places = np.arange(first, stop, dtype=np.int64)
        whole = places < self.full
        places[whole] = permute(places[whole], self.full, f"{self.seed}/0")
        return places * self.stride


def check_windows(seq_len: int, stride: int, context: int) -> None:
    """Refuse windows that the model's context or the rule of strides does not allow."""
    if not 1 <= seq_len <= context:
        raise ConfigError(
            refusal(
                f"--seq-len {seq_len} must be at least 1 and at most the model's context of "
                f"{context}",
                legal=[min(max(seq_len, 1), context)],
            )
        )
    if not 1 <= stride <= seq_len:
        rule = f"--stride {stride} must be at least 1 and at most the {seq_len} tokens of a window"
        raise ConfigError(refusal(rule, legal=[min(max(stride, 1), seq_len)]))
