"""The text of an evaluation, held out by a run or any other, and its division into rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.checkpoint.commit import read_manifest
from meshwright.data import IGNORE, PADDING, Rows, Tokenizer, load_tokenizer, open_data
from meshwright.data.dataset import Dataset, Say, refuse_changed
from meshwright.data.permutation import permute
from meshwright.data.sampler import WholeSampler
from meshwright.data.view import TokenView
from meshwright.errors import ConfigError, DataError, refusal
from meshwright.spec.stored import find_step
from meshwright.spec.training import DataFormat, DataSpec
from meshwright.training.run_folder import Job, RunFolder, read_job


@dataclass(frozen=True)
class Windows:
    """Rows of at most `seq_len` inputs that start every `stride` tokens of a text.

    Every token but the first is the target of exactly one row, the first that reaches it: where
    rows overlap, the later row scores only the tokens that the earlier one did not reach, with up
    to `seq_len` tokens before them as context. The last row ends with the text. These are the
    windows of huggingface.co/docs/transformers/perplexity with a `max_length` of `seq_len + 1`.

    Full rows are in the order in which a run with this seed reads them, so that the first ones are
    a sample of the text; with a stride of `seq_len` they are those of the run's evaluation. With
    packing "documents", attention stays inside a document, whose first token is not a target.
    `begin` are ids that the model expects before every text: rows that begin inside a document get
    them in addition to their `seq_len` inputs.
    """

    view: TokenView
    seq_len: int
    stride: int
    packing: Literal["stream", "documents"] = "stream"
    seed: int = 0
    begin: tuple[int, ...] = ()

    @property
    def full(self) -> int:
        """The number of rows with `seq_len` inputs."""
        return max(0, (len(self.view) - 1 - self.seq_len) // self.stride + 1)

    def __len__(self) -> int:
        covered = 0 if self.full == 0 else (self.full - 1) * self.stride + self.seq_len
        return self.full + (covered < len(self.view) - 1)

    def scored(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the first and past-the-last token that each row scores, int64 [rows, 2].

        Rows are `first` to `stop`.
        """
        starts = self._starts(first, stop)
        begins = starts + 1 + np.where(starts == 0, 0, self.seq_len - self.stride)
        ends = np.minimum(starts + self.seq_len, len(self.view) - 1) + 1
        return np.stack([begins, ends], axis=1)

    def rows(self, first: int, stop: int) -> Rows:
        """Return rows `first` to `stop`, padded on the right; targets not scored are `IGNORE`.

        Raises DataError for an id outside the vocabulary.
        """
        starts, scored = self._starts(first, stop), self.scored(first, stop)
        length = int((scored[:, 1] - starts).max())
        positions = starts[:, None] + np.arange(length)
        inside = np.minimum(positions, len(self.view) - 1)
        ids = np.zeros_like(positions)
        for row, (start, end) in enumerate(zip(starts, scored[:, 1], strict=True)):
            ids[row, : end - start] = self.view.read(int(start), int(end))
        targets = ids[:, 1:].copy()
        targets[(positions[:, 1:] < scored[:, :1]) | (positions[:, 1:] >= scored[:, 1:])] = IGNORE
        if self.packing == "stream":
            return self._begun(Rows(ids[:, :-1], targets, None))
        documents = np.searchsorted(self.view.ends, inside, side="right")
        documents -= documents[:, :1]
        targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
        documents[positions >= scored[:, 1:] - 1] = (
            PADDING  # also the last token, which is a target only
        )
        return self._begun(Rows(ids[:, :-1], targets, documents[:, :-1]))

    def _begun(self, rows: Rows) -> Rows:
        """Prepend `begin` to rows that lack it; rows that begin with it get padding instead."""
        count = len(self.begin)
        if count == 0:
            return rows
        before = np.tile(np.array(self.begin, dtype=np.int64), (len(rows.inputs), 1))
        inputs = np.concatenate([before, rows.inputs], axis=1)
        targets = np.concatenate([np.full_like(before, IGNORE), rows.targets], axis=1)
        segments = rows.segments
        if segments is not None:
            segments = np.concatenate([segments[:, :1].repeat(count, axis=1), segments], axis=1)
        for row in np.flatnonzero((rows.inputs[:, :count] == before).all(axis=1)).tolist():
            for values in (inputs, targets, segments):
                if values is not None:  # it has them already: those in front become padding
                    values[row] = np.roll(values[row], -count)
            if segments is not None:
                segments[row, -count:] = PADDING
        return Rows(inputs, targets, segments)

    def texts(self, rows: int) -> Iterator[NDArray[np.int64]]:
        """Yield the ids that the first `rows` rows score, in the longest pieces within a document.

        Adjacent rows are joined, since a character of several tokens can cross their boundary.
        """
        view, ends, ranges = self.view, self.view.ends, self.scored(0, rows)
        ordered = ranges[np.argsort(ranges[:, 0])]
        joins = np.flatnonzero(ordered[1:, 0] != ordered[:-1, 1]) + 1
        for group in np.split(ordered, joins):
            start, stop = group[0, 0], group[-1, 1]
            inner = ends[np.searchsorted(ends, start, "right") : np.searchsorted(ends, stop)]
            begins, stops = np.append(start, inner), np.append(inner, stop)
            if self.packing == "documents":  # of which the first token is not scored
                begins = begins + np.isin(begins, ends)
            for begin, end in zip(begins.tolist(), stops.tolist(), strict=True):
                yield view.read(begin, end)

    def lengths(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the number of inputs of each row without padding, int64 [rows]."""
        starts, count = self._starts(first, stop), len(self.begin)
        begun = [
            tuple(self.view.read(start, start + count).tolist()) == self.begin for start in starts
        ]
        return self.scored(first, stop)[:, 1] - starts - 1 + np.where(begun, 0, count)

    def _starts(self, first: int, stop: int) -> NDArray[np.int64]:
        indices = np.arange(first, stop, dtype=np.int64)
        is_full = indices < self.full
        indices[is_full] = permute(indices[is_full], self.full, f"{self.seed}/0")
        return indices * self.stride


class Conversations:
    """Rows of packed conversations, in the order in which a run with this seed evaluates them.

    Only tokens that training would train on are scored. Has the interface of `Windows`.
    """

    packing: Literal["documents"] = "documents"

    def __init__(self, view: TokenView, seq_len: int, seed: int = 0) -> None:
        self.view, self.seq_len, self.stride = view, seq_len, seq_len
        self._sampler = WholeSampler(
            view, seq_len=seq_len, batch=1, seed=seed, skips=True, name="text"
        )

    def __len__(self) -> int:
        return self._sampler.samples

    def rows(self, first: int, stop: int) -> Rows:
        """Return rows `first` to `stop`; targets that are not trained on are `IGNORE`."""
        return self._sampler.read(range(first, stop))

    def texts(self, rows: int) -> Iterator[NDArray[np.int64]]:
        """Yield the ids that the first `rows` rows score, each run of consecutive targets."""
        for row in range(rows):
            targets = self.rows(row, row + 1).targets[0]
            is_scored = targets != IGNORE
            cuts = np.flatnonzero(np.diff(is_scored)) + 1
            for ids, flags in zip(np.split(targets, cuts), np.split(is_scored, cuts), strict=True):
                if flags[:1].all():
                    yield ids


def check_windows(seq_len: int, stride: int, context: int) -> None:
    """Raise `ConfigError` unless 1 <= `seq_len` <= `context` and 1 <= `stride` <= `seq_len`."""
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


Packing = Literal["stream", "documents"]
# Tokens of a batch: enough to fill the device, few enough for its memory.
BATCH_TOKENS: Final = {"cpu": 4096, "cuda": 32768}


@dataclass(frozen=True)
class Text:
    """Tokens to evaluate on, and the settings by which the model's run reads them.

    `seq_len` is that of the run's training, None for a model without a run. `begin` are the ids
    that such a model expects before every text; it is empty for a run, which is trained on rows
    that begin anywhere in a document.
    """

    name: str
    view: TokenView
    tokenizer: Tokenizer
    seq_len: int | None
    packing: Packing = "stream"
    seed: int = 0
    form: DataFormat = "text"
    begin: tuple[int, ...] = ()


def run_of(folder: Path) -> Job | None:
    """Return the job of the run that a folder or its parents belong to; None if there is none."""
    for path in (folder, *folder.resolve().parents[:2]):
        if RunFolder(path).plan.is_file() and RunFolder(path).config.is_file():
            return read_job(path)
    return None


def held_out(folder: Path, vocab_size: int, say: Say | None = None) -> Text:
    """Return the validation split of the run that a model is from.

    Raises `ConfigError` if the model is not from a run, or the run held nothing out or was trained
    on streamed data or a blend; raises DataError if its data is not what the newest step was
    trained on.
    """
    job = run_of(folder)
    if job is None:
        raise ConfigError(f"{folder} is not a run, so it has no held-out text; give --source")
    data = open_data(job.config.data, job.cache, vocab_size, say)
    step = find_step(folder)
    trained_on = {} if step is None else read_manifest(step).get("identity", {})
    refuse_changed(
        {key: trained_on[key] for key in data.identity if key in trained_on}, data.identity
    )
    if not isinstance(data, Dataset) or len(data.parts) > 1:
        kind = "a stream" if job.config.data.streaming else "a blend"
        raise ConfigError(
            f"{folder} was trained on {kind}, which has no single held-out text; give --source"
        )
    if data.tokens("validation") < 2:
        raise ConfigError(
            f"{folder} held nothing out (data.validation = {data.spec.validation}); give --source"
        )
    name = f"held-out documents of {', '.join(data.spec.sources)}"
    return Text(
        name,
        data.parts[0].validation,
        data.tokenizer,
        job.config.train.seq_len,
        data.spec.packing,
        data.spec.seed,
        data.spec.format,
    )


def windows_of(
    text: Text,
    seq_len: int,
    context: int,
    stride: int | None = None,
    packing: Packing | None = None,
) -> Windows | Conversations:
    """Return the rows of a text, each with `seq_len` inputs, that start every `stride` tokens.

    `context` is the maximum of `seq_len`. `stride` defaults to `seq_len` and `packing` to the
    text's. Raises `ConfigError` for values out of range, or if either is set for conversations.
    """
    step = seq_len if stride is None else stride
    check_windows(seq_len, step, context)
    if text.form == "text":
        how = packing or text.packing
        return Windows(text.view, seq_len, step, how, text.seed, text.begin)
    if step != seq_len or packing == "stream":
        rule = "--stride and --packing stream cut texts, and conversations are read whole"
        raise ConfigError(refusal(rule, legal=["no such option"]))
    return Conversations(text.view, seq_len, text.seed)


def given(
    folder: Path,
    spec: DataSpec,
    cache: Path,
    vocab_size: int,
    say: Say | None = None,
) -> Text:
    """Return all documents of `spec.sources`, tokenized by `spec.tokenizer`.

    Text is prepared under `cache`, as for a run. Raises DataError as `open_data` does, and if a
    source is a store with another tokenizer.
    """
    all_of_it = {"validation": 0.0, "streaming": False, "weights": None}
    data = open_data(spec.model_copy(update=all_of_it), cache, vocab_size, say)
    assert isinstance(data, Dataset)
    asked = load_tokenizer(spec.tokenizer, spec.eos, spec.bos)
    if data.tokenizer.digest != asked.digest:
        raise DataError(
            f"{', '.join(spec.sources)} was prepared with the tokenizer {data.tokenizer.name!r}, "
            f"but the model has {asked.name!r}; prepare the text with that one"
        )
    job = run_of(folder)
    name = ", ".join(spec.sources)
    if job is None:
        tokenizer, form = data.tokenizer, data.spec.format
        view, packing = data.parts[0].train, data.spec.packing
        return Text(name, view, tokenizer, None, packing, form=form, begin=tokenizer.bos_ids)
    config = job.config
    return Text(
        name,
        data.parts[0].train,
        data.tokenizer,
        config.train.seq_len,
        config.data.packing if spec.format == "text" else spec.packing,
        config.data.seed,
        spec.format,
    )
