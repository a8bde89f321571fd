"""`open_stream`: a data set that is read during training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final, Literal

import numpy as np

from meshwright.data.corpora import HuggingFace
from meshwright.data.encoders import Encoded, Encoder, Encoding, worded
from meshwright.data.sampler import Sampler
from meshwright.data.slots import StreamSampler
from meshwright.data.stream import Documents, Place
from meshwright.data.tokenizers import Tokenizer
from meshwright.data.view import Mask, Shard, TokenView, split
from meshwright.data.whole import WholeSampler
from meshwright.errors import DataError
from meshwright.files import sha256_bytes
from meshwright.spec.training import DataSpec, TrainSpec
from meshwright.units import counted

HELD_AT_ONCE: Final = 64  # documents


@dataclass(frozen=True, eq=False)
class StreamedDataset:
    """The data of a run from a stream, like a `Dataset` from a store.

    A stream's size and entropy are unknown.
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
        """The tokenizer of its texts."""
        return self.encoder.tokenizer

    def tokens(self, split: str) -> None:
        """Return None: a stream does not say."""

    def sampler(self, split: Literal["train"], seq_len: int, batch: int) -> StreamSampler:
        """Return the sampler of the training documents."""
        packing = self.spec.packing
        return StreamSampler(
            self.documents, self.encoder, seq_len=seq_len, batch=batch, packing=packing
        )

    def held_out(self, seq_len: int, batch: int, batches: int) -> Sampler:
        """Return the sampler of enough held-out documents for some batches.

        They are read from the beginning of the stream, and kept. Raises DataError if the stream has
        not enough for one sample.
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
        """Read the first documents; DataError if training or evaluation has none.

        Returns what truncation takes of the first conversations, and what of them is not read or
        trained: of the others it does not show before they are read. Whether what is held out is
        enough shows only when it is read, too.
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
        """Return how many of the first conversations were `read` and `cut`, and `tokens_cut`.

        Nothing where documents are not conversations.
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
    """Open the streamed data set of a DataSpec; reads no rows yet.

    Raises DataError if the tokenizer cannot be used or does not fit into `vocab_size`.
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
