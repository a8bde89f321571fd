"""Rows of global batches from a stream, and the position that makes them go on.

Each row of the batch reads documents of its own: the next document of the stream goes to the row
that has been given the fewest characters. That follows from the texts alone, so a rank tokenises
the documents of its own rows only, and what a row reads is the same on every layout.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.sampler import IGNORE, Rows, chosen_rows
from meshwright.data.stream import Documents, Place
from meshwright.data.tokenizers import Tokenizer
from meshwright.errors import DataError

AHEAD: Final = 4  # steps that are read while others are trained on


class Mark(NamedTuple):
    """Where a block begins, and the characters that each row of the batch had been given there."""

    place: Place
    given: tuple[int, ...]


@dataclass(frozen=True)
class StreamPosition:
    """Where some rows of the batch are.

    `rows` has for each the document that it reads and how many tokens of that are used up; the
    first of these documents lies behind `mark`.
    """

    rows: Mapping[int, tuple[int, int]]
    mark: Mark

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "rows": [[row, *at] for row, at in sorted(self.rows.items())],
            "place": self.mark.place.to_json(),
            "given": list(self.mark.given),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> StreamPosition:
        """Read what `to_json` returned."""
        rows = {row: (document, used) for row, document, used in values["rows"]}
        return StreamPosition(rows, Mark(Place(**values["place"]), tuple(values["given"])))

    @staticmethod
    def joined(positions: Iterable[StreamPosition]) -> StreamPosition:
        """Return the position of all rows that ranks have between them."""
        found = list(positions)
        rows = {row: at for position in found for row, at in position.rows.items()}
        behind = min(found, key=lambda position: min(position.rows.values()))
        return StreamPosition(rows, behind.mark)


class StreamSampler:
    """Global batches of `batch` sequences of `seq_len` tokens, one step after the other.

    A thread reads and tokenises `AHEAD` steps further than what is trained on.
    """

    samples = None

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        batch: int,
        packing: str = "stream",
    ) -> None:
        by_document = packing == "documents"
        self._read = partial(_Reader, documents, tokenizer, seq_len, by_document)
        self.batch = batch
        self._begin = StreamPosition(
            dict.fromkeys(range(batch), (0, 0)), Mark(Place(), (0,) * batch)
        )
        self._reader: _Reader | None = None
        self._rows, self._next = range(0), 0
        self._pool = ThreadPoolExecutor(1, "stream")
        self._ahead: deque[Future[tuple[Rows, StreamPosition]]] = deque()
        self._position = self._begin

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go on from a position of all rows of the batch, before anything is read.

        Raises DataError for one of another batch.
        """
        assert self._reader is None
        found = StreamPosition.from_json(position)
        if len(found.rows) != self.batch:
            raise DataError(
                f"the run has read its stream as {len(found.rows)} rows, train.batch = {self.batch}"
            )
        self._begin = self._position = found

    def rows(self, step: int, rows: range | slice | None = None) -> Rows:
        """Return rows of the global batch of a step, the same rows and the next step each time.

        Raises IndexError for other rows or steps, and DataError for what cannot be read.
        """
        chosen = chosen_rows(self.batch, rows)
        if self._reader is None:
            self._reader, self._rows, self._next = self._read(chosen, self._begin), chosen, step
        if (step, chosen) != (self._next, self._rows):
            raise IndexError(f"a stream is at step {self._next} of {self._rows}, not {step}")
        while len(self._ahead) <= AHEAD:
            self._ahead.append(self._pool.submit(self._reader.step))
        found, self._position = self._ahead.popleft().result()
        self._next += 1
        return found

    def position(self) -> StreamPosition:
        """Return where the rows are after those that `rows` returned last."""
        return self._position


class _Row:
    """What one row of the batch has of its documents and has not used yet."""

    def __init__(self, document: int, used: int) -> None:
        self.at = (document, used)
        self.parts: deque[tuple[int, NDArray[np.int32]]] = deque()
        self.length = 0

    def add(self, document: int, ids: NDArray[np.int32]) -> None:
        if not self.parts:
            # Its first document may be a later one; another tokenizer may have made it shorter.
            used = min(self.at[1], len(ids) - 1) if document == self.at[0] else 0
            self.at, self.length = (document, used), -used
        self.parts.append((document, ids))
        self.length += len(ids)

    def window(self, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the next `length` tokens and the numbers of their documents, from 0."""
        ids, of, used = np.empty(length, np.int64), np.empty(length, np.int64), self.at[1]
        filled = 0
        for number, (_, part) in enumerate(self.parts):
            taken = min(length - filled, len(part) - used)
            ids[filled : filled + taken] = part[used : used + taken]
            of[filled : filled + taken] = number
            filled, used = filled + taken, 0
            if filled == length:
                break
        return ids, of

    def advance(self, length: int) -> None:
        """Use tokens up; at least one more must be there."""
        used = self.at[1] + length
        while used >= len(self.parts[0][1]):
            used -= len(self.parts.popleft()[1])
        self.at = (self.parts[0][0], used)
        self.length -= length


class _Reader:
    """Makes the rows of some places of the batch, step by step."""

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        seq_len: int,
        by_document: bool,
        rows: range,
        begin: StreamPosition,
    ) -> None:
        self._tokenizer, self._seq_len, self._by_document = tokenizer, seq_len, by_document
        self._rows = {row: _Row(*begin.rows[row]) for row in rows}
        self._texts: dict[int, deque[tuple[int, str]]] = {row: deque() for row in rows}
        self._heap = [(given, row) for row, given in enumerate(begin.mark.given)]
        heapq.heapify(self._heap)
        self._blocks = documents.blocks(begin.mark.place)
        self._marks: deque[Mark] = deque()

    def step(self) -> tuple[Rows, StreamPosition]:
        """Return the rows of the next step, and the position after them."""
        self._fill()
        windows = [row.window(self._seq_len + 1) for row in self._rows.values()]
        ids = np.stack([one for one, _ in windows])
        of = np.stack([one for _, one in windows])
        for row in self._rows.values():
            row.advance(self._seq_len)
        found = Rows(ids[:, :-1].copy(), ids[:, 1:].copy(), None)
        if self._by_document:
            found.targets[of[:, 1:] != of[:, :-1]] = IGNORE
            found = Rows(found.inputs, found.targets, of[:, :-1].copy())
        at = {number: row.at for number, row in self._rows.items()}
        first = min(document for document, _ in at.values())
        while len(self._marks) > 1 and self._marks[1].place.document <= first:
            self._marks.popleft()
        return found, StreamPosition(at, self._marks[0])

    def _fill(self) -> None:
        """Give each row what it lacks, tokenising the documents of all rows together."""
        while lacking := [n for n, row in self._rows.items() if row.length <= self._seq_len]:
            for number in lacking:
                while not self._texts[number]:
                    self._read_block()
            taken = [self._texts[number].popleft() for number in lacking]
            found = self._tokenised([text for _, text in taken])
            for number, (document, _), ids in zip(lacking, taken, found, strict=True):
                self._rows[number].add(document, ids)

    def _tokenised(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        ids, lengths = self._tokenizer.pack(texts)
        limit = self._tokenizer.vocab_size
        if ids.min() < 0 or ids.max() >= limit:
            raise DataError(
                f"tokenizer {self._tokenizer.name} gave an id outside its vocabulary of {limit} "
                f"(ids {ids.min()} to {ids.max()})"
            )
        return np.split(ids.astype(np.int32), np.cumsum(lengths)[:-1])

    def _read_block(self) -> None:
        """Hand the documents of the next block out to the rows of the batch."""
        given = tuple(given for given, _ in sorted(self._heap, key=lambda pair: pair[1]))
        place, texts = next(self._blocks)
        self._marks.append(Mark(place, given))
        for document, text in enumerate(texts, place.document):
            given_before, number = self._heap[0]
            heapq.heapreplace(self._heap, (given_before + len(text), number))
            if number in self._rows and document >= self._rows[number].at[0]:
                self._texts[number].append((document, text))
