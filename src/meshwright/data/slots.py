"""Rows of global batches from a stream, and the position from which they continue.

Each row of the batch reads its own documents: the next document of the stream goes to the row that
has received the fewest characters. This follows from the texts alone, so a rank tokenizes only the
documents of its own rows, and a row is the same on every layout.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.conversations import Conversation
from meshwright.data.encoders import Encoder
from meshwright.data.sampler import IGNORE, Rows, chosen_rows
from meshwright.data.stream import Documents, Place
from meshwright.data.whole import filled_row
from meshwright.errors import DataError

AHEAD: Final = 4  # steps that are read while others are trained on


class Mark(NamedTuple):
    """The beginning of a block, and the characters that each row had received there."""

    place: Place
    given: tuple[int, ...]


@dataclass(frozen=True)
class StreamPosition:
    """The position of some rows of the batch.

    `rows` has for each its current document and the number of its used tokens; the first of these
    documents comes after `mark`.
    """

    rows: Mapping[int, tuple[int, int]]
    mark: Mark

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "rows": [[row, *progress] for row, progress in sorted(self.rows.items())],
            "place": self.mark.place.to_json(),
            "given": list(self.mark.given),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> StreamPosition:
        """Return the position that `to_json` has written."""
        rows = {row: (document, used) for row, document, used in values["rows"]}
        return StreamPosition(rows, Mark(Place(**values["place"]), tuple(values["given"])))

    @staticmethod
    def joined(positions: Iterable[StreamPosition]) -> StreamPosition:
        """Return the position of all rows from those of the ranks."""
        per_rank = list(positions)
        rows = {row: progress for position in per_rank for row, progress in position.rows.items()}
        behind = min(per_rank, key=lambda position: min(position.rows.values()))
        return StreamPosition(rows, behind.mark)


class StreamSampler:
    """Global batches of `batch` sequences of `seq_len` tokens, one step after the other.

    A thread reads and tokenizes `AHEAD` steps ahead of training.
    """

    samples = None

    def __init__(
        self,
        documents: Documents,
        encoder: Encoder,
        *,
        seq_len: int,
        batch: int,
        packing: str = "stream",
    ) -> None:
        by_document = packing == "documents"
        self._read = partial(_Reader, documents, encoder, seq_len, by_document)
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
        """Continue from a position of all rows of the batch, before anything is read.

        Raises DataError for one of another batch.
        """
        assert self._reader is None
        begin = StreamPosition.from_json(position)
        if len(begin.rows) != self.batch:
            raise DataError(
                f"the run has read its stream as {len(begin.rows)} rows, train.batch = {self.batch}"
            )
        self._begin = self._position = begin

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
        batch_rows, self._position = self._ahead.popleft().result()
        self._next += 1
        return batch_rows

    def position(self) -> StreamPosition:
        """Return the position of the rows after those that `rows` returned last."""
        return self._position


class _Part(NamedTuple):
    """A document's number, ids and, of a conversation, which of them are trained."""

    document: int
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_] | None


class _Row:
    """The tokens that one row of the batch has received and not used yet."""

    def __init__(self, document: int, used: int) -> None:
        self.at = (document, used)
        self.parts: deque[_Part] = deque()
        self.length = 0

    def add(self, part: _Part) -> None:
        if not self.parts:
            # Its first document may be a later one; another tokenizer may have made it shorter.
            used = min(self.at[1], len(part.ids) - 1) if part.document == self.at[0] else 0
            self.at, self.length = (part.document, used), -used
        self.parts.append(part)
        self.length += len(part.ids)

    def window(self, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the next `length` tokens and the numbers of their documents, from 0."""
        ids, documents, used = np.empty(length, np.int64), np.empty(length, np.int64), self.at[1]
        filled = 0
        for number, part in enumerate(self.parts):
            count = min(length - filled, len(part.ids) - used)
            ids[filled : filled + count] = part.ids[used : used + count]
            documents[filled : filled + count] = number
            filled, used = filled + count, 0
            if filled == length:
                break
        return ids, documents

    def whole(self, length: int) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Return the next documents that fit into `length` tokens, and use them."""
        documents: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
        while len(self.parts[0].ids) <= length:
            part = self.parts.popleft()
            assert part.mask is not None
            documents.append((part.ids, part.mask))
            length -= len(part.ids)
            self.length -= len(part.ids)
        self.at = (self.parts[0].document, 0)
        return documents

    def advance(self, length: int) -> None:
        """Mark tokens as used; at least one more must exist."""
        used = self.at[1] + length
        while used >= len(self.parts[0].ids):
            used -= len(self.parts.popleft().ids)
        self.at = (self.parts[0].document, used)
        self.length -= length


class _Reader:
    """Reads the stream and fills the given rows of the batch, step by step."""

    def __init__(
        self,
        documents: Documents,
        encoder: Encoder,
        seq_len: int,
        by_document: bool,
        rows: range,
        begin: StreamPosition,
    ) -> None:
        self._encoder, self._seq_len, self._by_document = encoder, seq_len, by_document
        self._rows = {row: _Row(*begin.rows[row]) for row in rows}
        self._texts: dict[int, deque[tuple[int, str]]] = {row: deque() for row in rows}
        self._heap = [(received, row) for row, received in enumerate(begin.mark.given)]
        heapq.heapify(self._heap)
        self._blocks = documents.blocks(begin.mark.place)
        self._marks: deque[Mark] = deque()

    def step(self) -> tuple[Rows, StreamPosition]:
        """Return the rows of the next step, and the position after them."""
        self._fill()
        rows = self._filled() if self._encoder.template is not None else self._cut()
        progress = {number: row.at for number, row in self._rows.items()}
        first = min(document for document, _ in progress.values())
        while len(self._marks) > 1 and self._marks[1].place.document <= first:
            self._marks.popleft()
        return rows, StreamPosition(progress, self._marks[0])

    def _filled(self) -> Rows:
        """Return rows of whole conversations, as many in each as fit."""
        filled = [
            filled_row(r.whole(self._seq_len + 1), self._seq_len) for r in self._rows.values()
        ]
        return Rows(*(np.stack(parts) for parts in zip(*filled, strict=True)))

    def _cut(self) -> Rows:
        """Return rows cut from the documents one after the other."""
        windows = [row.window(self._seq_len + 1) for row in self._rows.values()]
        ids = np.stack([window_ids for window_ids, _ in windows])
        documents = np.stack([window_documents for _, window_documents in windows])
        for row in self._rows.values():
            row.advance(self._seq_len)
        rows = Rows(ids[:, :-1].copy(), ids[:, 1:].copy(), None)
        if self._by_document:
            rows.targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
            rows = Rows(rows.inputs, rows.targets, documents[:, :-1].copy())
        return rows

    def _fill(self) -> None:
        """Give each row the tokens that it lacks, tokenising the documents of all rows together."""
        # Of whole conversations one must be left over, which the position then is at.
        enough = self._seq_len + (1 if self._encoder.template is None else 2)
        while lacking := [n for n, row in self._rows.items() if row.length < enough]:
            for number in lacking:
                while not self._texts[number]:
                    self._read_block()
            pending = [self._texts[number].popleft() for number in lacking]
            tokenised = self._tokenised([text for _, text in pending])
            for number, (document, _), (ids, mask) in zip(lacking, pending, tokenised, strict=True):
                self._rows[number].add(_Part(document, ids, mask))

    def _tokenised(
        self, texts: Sequence[str]
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_] | None]]:
        encoded, tokenizer = self._encoder.encode(texts), self._encoder.tokenizer
        limit, ids = tokenizer.vocab_size, encoded.ids
        if ids.min() < 0 or ids.max() >= limit:
            raise DataError(
                f"tokenizer {tokenizer.name} gave an id outside its vocabulary of {limit} "
                f"(ids {ids.min()} to {ids.max()})"
            )
        starts = np.cumsum(encoded.lengths)[:-1]
        split_ids = np.split(ids.astype(np.int32), starts)
        if encoded.mask is None:
            yield from ((document_ids, None) for document_ids in split_ids)
            return
        longest = self._seq_len + 1
        for text, document_ids, mask in zip(
            texts, split_ids, np.split(encoded.mask, starts), strict=True
        ):
            if not mask[1:longest].any():
                where = Conversation.from_text(text).where
                raise DataError(
                    f"{where}: no token that is trained is among its first {longest} "
                    f"(train.seq_len = {self._seq_len}). Raise train.seq_len"
                )
            yield document_ids[:longest], mask[:longest]

    def _read_block(self) -> None:
        """Hand the documents of the next block out to the rows of the batch."""
        received = tuple(received for received, _ in sorted(self._heap, key=lambda pair: pair[1]))
        place, texts = next(self._blocks)
        self._marks.append(Mark(place, received))
        for document, text in enumerate(texts, place.document):
            received_before, number = self._heap[0]
            heapq.heapreplace(self._heap, (received_before + len(text), number))
            if number in self._rows and document >= self._rows[number].at[0]:
                self._texts[number].append((document, text))
