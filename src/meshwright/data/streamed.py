"""Opens a Hugging Face data set that is read and tokenized during training, without a store."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.conversations import Conversation
from meshwright.data.corpora import HuggingFace
from meshwright.data.encoders import Encoded, Encoder, Encoding, worded
from meshwright.data.permutation import permute
from meshwright.data.sampler import (
    IGNORE,
    ReadRows,
    Rows,
    Sampler,
    WholeSampler,
    chosen_rows,
    filled_row,
)
from meshwright.data.tokenizers import Tokenizer
from meshwright.data.view import Mask, Shard, TokenView, split
from meshwright.errors import DataError
from meshwright.files import sha256_bytes
from meshwright.spec.training import DataSpec, TrainSpec
from meshwright.units import counted


@dataclass(frozen=True)
class Place:
    """The beginning of a shuffled block of documents in a streamed data set.

    `document` is the number of its first training document, counted over all epochs; `row` is the
    number of earlier rows in the epoch. `state` is the data set's own state (None at the
    beginning), and `digest` the SHA-256 of the block's texts.
    """

    document: int = 0
    epoch: int = 0
    row: int = 0
    state: Mapping[str, Any] | None = None
    digest: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, the keyword arguments of `Place`."""
        return asdict(self)


@dataclass(frozen=True)
class Documents:
    """The documents of a streamed data set; every `held_every`-th row is held out (0: none).

    Training documents are shuffled within blocks of `block` documents, by `seed`.
    """

    source: HuggingFace
    held_every: int
    block: int
    seed: int

    def held_out(self) -> Iterator[str]:
        """Yield the held-out documents of one epoch; training never sees them."""
        if self.held_every:
            for row, text in self._texts(self._opened(None), 0):
                if row % self.held_every == 0 and text.strip():
                    yield text

    def blocks(self, begin: Place) -> Iterator[tuple[Place, list[str]]]:
        """Yield shuffled blocks of training documents, epoch after epoch, each with its place.

        Raises DataError if there is no training document, if the data at `begin` has changed since
        its digest was recorded, or if a row has no text.
        """
        place = begin
        while True:
            opened = self._opened(place.state)
            texts = self._texts(opened, place.row)
            while True:
                block: list[str] = []
                row = place.row
                for row, text in texts:
                    if not (self.held_every and row % self.held_every == 0) and text.strip():
                        block.append(text)
                        if len(block) == self.block:
                            break
                if not block:
                    break
                yield self._sealed(place, block, begin), self._shuffled(place, block)
                place = Place(place.document + len(block), place.epoch, row + 1, _state_of(opened))
                if len(block) < self.block:
                    break
            if place.row == 0:
                raise DataError(f"hf:{self.source.name} has no document to train on")
            place = Place(place.document, place.epoch + 1)

    def _opened(self, state: Mapping[str, Any] | None) -> Any:
        opened = self.source.load(streaming=True)
        if state is not None:
            opened.load_state_dict(dict(state))
        return opened

    def _texts(self, opened: Any, first: int) -> Iterator[tuple[int, str]]:
        """Yield the index and text of each row, blank ones included; `first` is the first index."""
        rows = iter(opened)
        for number in count(first):
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # network, files: the library raises all kinds
                problem = f"hf:{self.source.name}, row {number}: {error!s:.300}"
                raise DataError(problem) from error
            yield number, self.source.document(number, row)

    def _sealed(self, place: Place, texts: list[str], begin: Place) -> Place:
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        if place.document == begin.document and begin.digest not in ("", digest):
            raise DataError(
                f"hf:{self.source.name} is not what the run was reading: row {place.row} and those "
                f"after it have changed (SHA-256 {digest:.16}, was {begin.digest:.16})"
            )
        return replace(place, digest=digest)

    def _shuffled(self, place: Place, texts: list[str]) -> list[str]:
        key = f"{self.seed}/{place.epoch}/{place.document}"
        order = permute(np.arange(len(texts), dtype=np.int64), len(texts), key)
        return [texts[number] for number in order.tolist()]


def _state_of(opened: Any) -> Mapping[str, Any]:
    state: Mapping[str, Any] = opened.state_dict()
    return state


AHEAD: Final = 4  # steps that are read while others are trained on


class Mark(NamedTuple):
    """The beginning of a block, and the characters that each row had received by then."""

    place: Place
    given: tuple[int, ...]


@dataclass(frozen=True)
class StreamPosition:
    """How far the stream has been read by some or all rows of the batch.

    `rows` maps each row to its current document and the number of tokens used of it. `mark` is the
    last block that begins no later than the earliest of these documents.
    """

    rows: Mapping[int, tuple[int, int]]
    mark: Mark

    def to_json(self) -> dict[str, Any]:
        """Return the position as JSON values, for `from_json`."""
        return {
            "rows": [[row, *progress] for row, progress in sorted(self.rows.items())],
            "place": self.mark.place.to_json(),
            "given": list(self.mark.given),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> StreamPosition:
        """Return the position that `to_json` wrote."""
        rows = {row: (document, used) for row, document, used in values["rows"]}
        return StreamPosition(rows, Mark(Place(**values["place"]), tuple(values["given"])))

    @staticmethod
    def joined(positions: Iterable[StreamPosition]) -> StreamPosition:
        """Return the position of all rows of the batch, given the positions of each rank's rows."""
        per_rank = list(positions)
        rows = {row: progress for position in per_rank for row, progress in position.rows.items()}
        behind = min(per_rank, key=lambda position: min(position.rows.values()))
        return StreamPosition(rows, behind.mark)


class StreamSampler:
    """Global batches of `batch` sequences of `seq_len` tokens, read from a stream step by step.

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
        """Start from a saved position of all rows of the batch; call it before `rows`.

        Raises DataError if the position is for another batch size.
        """
        assert self._reader is None
        begin = StreamPosition.from_json(position)
        if len(begin.rows) != self.batch:
            raise DataError(
                f"the run has read its stream as {len(begin.rows)} rows, train.batch = {self.batch}"
            )
        self._begin = self._position = begin

    def rows(self, step: int, rows: range | slice | None = None) -> Rows:
        """Return rows of the global batch of a step.

        Each call must ask for the same rows of the next step.

        Raises IndexError for other rows or steps, and DataError if the stream cannot be read.
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
        """Return the position after the rows that `rows` returned last."""
        return self._position


class _Part(NamedTuple):
    """A document's number, its token ids and, for a conversation, its loss mask."""

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
        """Return the next `length` tokens, and the number of each one's document in this window.

        Does not mark the tokens as used.
        """
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
        """Return the next documents that fit into `length` tokens together, and remove them."""
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
        """Mark the next `length` tokens as used; at least one more must be left."""
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
        """Return rows packed with as many of the next conversations as fit."""
        filled = [
            filled_row(r.whole(self._seq_len + 1), self._seq_len) for r in self._rows.values()
        ]
        inputs, targets, segments = (np.stack(parts) for parts in zip(*filled, strict=True))
        return Rows(inputs, targets, segments)

    def _cut(self) -> Rows:
        """Return rows of consecutive tokens of the concatenated documents."""
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
        """Tokenize documents until each row of the batch has enough tokens for the next step."""
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
        """Assign each document of the next block to the row with the fewest characters so far.

        Only documents for this reader's rows are stored.
        """
        received = tuple(received for received, _ in sorted(self._heap, key=lambda pair: pair[1]))
        place, texts = next(self._blocks)
        self._marks.append(Mark(place, received))
        for document, text in enumerate(texts, place.document):
            received_before, number = self._heap[0]
            heapq.heapreplace(self._heap, (received_before + len(text), number))
            if number in self._rows and document >= self._rows[number].at[0]:
                self._texts[number].append((document, text))


HELD_AT_ONCE: Final = 64  # documents


@dataclass(frozen=True, eq=False)
class StreamedDataset:
    """The data of a run read from a stream, with the interface of `Dataset`.

    The number of tokens and the unigram entropy are unknown.
    """

    spec: DataSpec
    documents: Documents
    encoder: Encoder
    vocab_size: int
    identity: dict[str, str]
    unigram_entropy: None = None
    folders: tuple[Path, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    _held: dict[int, TokenView] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the encoder."""
        return self.encoder.tokenizer

    def tokens(self, split: str) -> None:
        """Return None, since the length of a stream is unknown."""

    def sampler(self, split: Literal["train"], seq_len: int, batch: int) -> StreamSampler:
        """Return the sampler of the training documents."""
        packing = self.spec.packing
        return StreamSampler(
            self.documents, self.encoder, seq_len=seq_len, batch=batch, packing=packing
        )

    def reader(self, rows: ReadRows, stop: int) -> ReadRows:
        """Return what reads the rows of a sampler's next steps; a stream reads ahead by itself."""
        return rows

    def held_out(self, seq_len: int, batch: int, batches: int) -> Sampler:
        """Return a sampler of enough held-out documents for `batches` batches.

        They are read once from the beginning of the stream and cached. Raises DataError if the
        stream has too few for one sample.
        """
        tokens = batches * batch * seq_len + 1
        if tokens not in self._held:
            self._held[tokens] = self._read_held(tokens)
        name = "validation split"
        if self.spec.format == "chat":
            return WholeSampler(
                self._held[tokens], seq_len=seq_len, batch=batch, seed=self.spec.seed, name=name
            )
        return Sampler(
            self._held[tokens],
            seq_len=seq_len,
            batch=batch,
            seed=self.spec.seed,
            packing=self.spec.packing,
            name=name,
        )

    def check(self, train: TrainSpec) -> list[str]:
        """Read the first documents and return notes for the user on how their content is used.

        The notes say how many of the first conversations are truncated and what is not read or
        trained on. Raises DataError if training or evaluation has no documents; whether there are
        enough held-out ones shows only when they are read.
        """
        _, texts = next(self.documents.blocks(Place()))
        if train.eval_every and not self.documents.held_every:
            raise DataError("the validation split has 0 tokens (data.validation = 0)")
        if self.spec.format != "chat":
            return []
        sample = self.encoder.encode(texts[:HELD_AT_ONCE])
        first = self._truncated(sample, train.seq_len)
        among = f"of the first {counted(len(sample.lengths), 'conversation')} of the stream"
        notes = [f"note: {line}" for line in worded(sample.notes, among)]
        if not first["cut"]:
            return notes
        return [
            *notes,
            f"train: {first['cut']} of the first {first['read']} conversations of the stream are "
            f"cut to train.seq_len = {train.seq_len}; {first['tokens_cut']:,} tokens are cut off",
        ]

    def truncation(self, seq_len: int) -> dict[str, int]:
        """Return how many of the first conversations were `read` and `cut`, and the `tokens_cut`.

        Empty if documents are not conversations.
        """
        if self.spec.format != "chat":
            return {}
        texts = next(self.documents.blocks(Place()))[1]
        return self._truncated(self.encoder.encode(texts[:HELD_AT_ONCE]), seq_len)

    def _truncated(self, encoded: Encoded, seq_len: int) -> dict[str, int]:
        over = np.maximum(np.asarray(encoded.lengths) - (seq_len + 1), 0)
        cut = int((over > 0).sum())
        return {"read": len(encoded.lengths), "cut": cut, "tokens_cut": int(over.sum())}

    def _read_held(self, tokens: int) -> TokenView:
        parts: list[Encoded] = []
        texts: Iterator[str] = self.documents.held_out()
        while sum(len(part.ids) for part in parts) < tokens and (
            batch := list(islice(texts, HELD_AT_ONCE))
        ):
            parts.append(self.encoder.encode(batch))
        if not parts:
            raise DataError(f"hf:{self.documents.source.name} holds no document out")
        ids = np.concatenate([part.ids for part in parts]).astype(np.int32)
        ends = np.cumsum(np.concatenate([part.lengths for part in parts]))
        masks = [part.mask for part in parts if part.mask is not None]
        mask = Mask(np.concatenate(masks).astype(np.uint8), None) if masks else None
        shard = Shard(Path(self.documents.source.name), ids, ends, mask=mask)
        return split([shard], 0.0, self.vocab_size)[0]


def open_stream(spec: DataSpec, vocab_size: int | None = None) -> StreamedDataset:
    """Open the streamed data set of a DataSpec without reading rows.

    Raises DataError if the tokenizer cannot be used or is larger than `vocab_size`.
    """
    source = HuggingFace.parse(spec.sources[0].removeprefix("hf:"), spec.text_key, spec.format)
    encoder = Encoding(spec.tokenizer, spec.eos, spec.format, spec.chat_template, spec.bos).load()
    tokenizer = encoder.tokenizer
    check_vocabulary(tokenizer, vocab_size)
    # One of how many documents is held out; at least every other one is trained on.
    held_every = max(2, round(1 / spec.validation)) if spec.validation else 0
    names = ["stream", source.name, source.config, source.split, source.text_key]
    identity = {
        "tokenizer": encoder.digest,
        "data": sha256_bytes(json.dumps([*names, spec.shuffle_buffer]).encode()),
        "validation": str(spec.validation),
        "packing": spec.packing,
        "seed": str(spec.seed),
    }
    documents = Documents(source, held_every, spec.shuffle_buffer, spec.seed)
    return StreamedDataset(spec, documents, encoder, tokenizer.vocab_size, identity)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    """Raise DataError if a model's vocabulary is smaller than a tokenizer's."""
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"model.vocab_size = {vocab_size} is smaller than the vocabulary of "
            f"{tokenizer.vocab_size} of the tokenizer {tokenizer.name}"
        )
