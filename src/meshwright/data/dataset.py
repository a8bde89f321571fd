"""Opens the data that a `DataSpec` describes, as a data set with samplers for each split."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.corpora import Files, HuggingFace, Source, Stdlib, TinyStories
from meshwright.data.encoders import Encoding
from meshwright.data.megatron_pair import megatron_prefix, open_megatron
from meshwright.data.remote import RowsAhead, open_remote
from meshwright.data.sampler import ReadRows, Rows, Sampler, WholeSampler, chosen_rows
from meshwright.data.store import FORMAT, Progress, Store, entropy_of, is_store, open_store
from meshwright.data.streamed import StreamedDataset, check_vocabulary, open_stream
from meshwright.data.tokenizers import Tokenizer, load_tokenizer
from meshwright.data.view import Shard, TokenView, split
from meshwright.data.writer import prepare, read_notes
from meshwright.errors import DataError, refusal
from meshwright.files import sha256_bytes
from meshwright.spec.training import DataSpec, TrainSpec
from meshwright.store import StorePath, is_url
from meshwright.units import MIB, format_bytes


@dataclass(frozen=True)
class _Pair:
    """A node of the binary tree of a blend: two children, each a source's number or another node.

    `share` is the fraction of the node's samples that come from the left child.
    """

    left: int | _Pair
    right: int | _Pair
    share: Fraction

    def before(self, sample: int) -> int:
        """Return how many of the node's first `sample` samples come from the left child."""
        a, b = self.share.numerator, self.share.denominator
        return (2 * sample * a + b) // (2 * b)


class Blend:
    """Assigns each sample to one of several sources, in proportion to their weights.

    Sources are joined in pairs into a binary tree, the two lightest first (Huffman 1952). After any
    number of samples, the left child of a node has received its share of the node's samples,
    rounded. So the count of a source is always within 2 of its exact share (within 1/2 for two
    sources): each level adds a rounding error of at most 1/2, and passes an error on multiplied by
    at most 2/3, the largest share of an inner node in its parent. Unlike the greedy rule of
    Megatron-LM (`build_blending_indices`), this needs no pass over the earlier samples and no
    table.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # Decimals as they are written: 0.1 is exactly a tenth.
        exact = [Fraction(repr(weight)) for weight in weights]
        self.shares = tuple(weight / sum(exact) for weight in exact)
        heap: list[tuple[Fraction, int, int | _Pair]] = [
            (share, number, number) for number, share in enumerate(self.shares)
        ]
        heapq.heapify(heap)
        while len(heap) > 1:
            right, light_order, light = heapq.heappop(heap)
            left, heavy_order, heavy = heapq.heappop(heap)
            pair = _Pair(heavy, light, left / (left + right))
            heapq.heappush(heap, (left + right, min(light_order, heavy_order), pair))
        self._root = heap[0][2]

    def place(self, sample: int) -> tuple[int, int]:
        """Return the source of a sample, and how many earlier samples came from that source."""
        node = self._root
        while isinstance(node, _Pair):
            before = node.before(sample)
            if node.before(sample + 1) > before:
                node, sample = node.left, before
            else:
                node, sample = node.right, sample - before
        return node, sample

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each source."""
        counts = [0] * len(self.shares)

        def walk(node: int | _Pair, count: int) -> None:
            if isinstance(node, _Pair):
                left = node.before(count)
                walk(node.left, left)
                walk(node.right, count - left)
            else:
                counts[node] = count

        walk(self._root, samples)
        return counts


class BlendSampler:
    """Global batches whose rows are samples of several sources, chosen by a `Blend`.

    Each source is read in its own order, epoch after epoch, independently of the others. `samples`
    is how many samples are read before the first source starts its second epoch.
    """

    def __init__(self, blend: Blend, samplers: Sequence[Sampler], names: Sequence[str]) -> None:
        self.blend = blend
        self.samplers = tuple(samplers)
        self.names = tuple(names)
        self.batch = samplers[0].batch
        pairs = zip(self.samplers, blend.shares, strict=True)
        self.samples = max(1, min(int(sampler.samples / share) for sampler, share in pairs))

    def rows(self, step: int, rows: range | slice | None = None) -> Rows:
        """Return rows of the global batch of a step, by default all; see `Sampler.rows`."""
        first = step * self.batch
        draws = [self.blend.place(first + row) for row in chosen_rows(self.batch, rows)]
        sources = np.array([source for source, _ in draws], dtype=np.int64)
        parts: list[Rows | None] = [None] * len(self.samplers)
        for number in np.unique(sources).tolist():
            samples = [sample for source, sample in draws if source == number]
            parts[number] = self.samplers[number].read(samples)
        drawn = {number: part for number, part in enumerate(parts) if part is not None}
        inputs = _woven(sources, {number: part.inputs for number, part in drawn.items()})
        targets = _woven(sources, {number: part.targets for number, part in drawn.items()})
        segments = {n: part.segments for n, part in drawn.items() if part.segments is not None}
        left_out = tuple(line for part in drawn.values() for line in part.left_out)
        return Rows(inputs, targets, _woven(sources, segments) if segments else None, left_out)

    def passes(self, samples: int) -> list[dict[str, object]]:
        """Return each source's share, samples per epoch, and epochs after `samples` samples."""
        counts = self.blend.counts(samples)
        rows = zip(self.names, self.blend.shares, self.samplers, counts, strict=True)
        return [
            {
                "source": name,
                "share": float(share),
                "samples": sampler.samples,
                "epochs": count / sampler.samples,
            }
            for name, share, sampler, count in rows
        ]


def _woven(sources: NDArray[np.int64], parts: dict[int, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the rows of all sources in the order of the batch, int64 [rows, seq_len].

    `sources` has the source of each row of the batch, `parts` the rows of each source in order.
    """
    width = next(iter(parts.values())).shape[1] if parts else 0
    out = np.empty((len(sources), width), dtype=np.int64)
    for number, part in parts.items():
        out[sources == number] = part
    return out


Split = Literal["train", "validation"]
Say = Callable[[str], None]
PROBE_TOKENS = MIB
SAY_EVERY_S = 1.0


@dataclass(frozen=True, eq=False)
class BlendPart:
    """A source of a blend: its name, and its training and validation tokens."""

    name: str
    train: TokenView
    validation: TokenView


@dataclass(frozen=True, eq=False)
class Dataset:
    """The data of a run: a training and a validation split, for all sources together or for each.

    `parts` are the sources that `data.weights` draws from; without weights it is one part, all
    sources concatenated. `unigram_entropy` is the entropy of the distribution of token ids, in
    nats: the loss of a model that knows only token frequencies (None for a Megatron pair, which is
    not read completely). `identity` must be unchanged when a run is resumed. The validation split
    is empty if its share is 0. `vocab_size` bounds every id. `folders` are the prepared stores, in
    order. `files` has the digests of the files, by the names that users see. `is_remote`: whether a
    source is in an object store.
    """

    spec: DataSpec
    parts: tuple[BlendPart, ...]
    tokenizer: Tokenizer
    vocab_size: int
    unigram_entropy: float | None
    identity: dict[str, str]
    folders: tuple[Path, ...]
    files: dict[str, str]
    is_remote: bool = False

    def reader(self, rows: ReadRows, stop: int) -> ReadRows:
        """Return what reads the rows of a sampler's next steps up to `stop`: ahead if remote."""
        return RowsAhead(rows, stop) if self.is_remote else rows

    def tokens(self, split: Split) -> int:
        """Return how many tokens a split has."""
        return sum(len(_view(part, split)) for part in self.parts)

    def documents(self, split: Split) -> int:
        """Return how many documents a split has."""
        return sum(_view(part, split).documents for part in self.parts)

    def held_out(self, seq_len: int, batch: int, batches: int) -> Sampler | BlendSampler:
        """Return the sampler of the validation split; only streamed data uses `batches`."""
        return self.sampler("validation", seq_len, batch)

    def check(self, train: TrainSpec) -> list[str]:
        """Check that the splits can be sampled, and return notes on truncated conversations.

        Raises DataError if a split that training or evaluation reads is shorter than one sample.
        """
        splits: list[Split] = ["train", "validation"] if train.eval_every else ["train"]
        notes = []
        for name in splits:
            sampler = self.sampler(name, train.seq_len, train.batch)
            samplers = sampler.samplers if isinstance(sampler, BlendSampler) else (sampler,)
            notes += [_told(part, name) for part in samplers if isinstance(part, WholeSampler)]
        return [line for line in notes if line]

    def sampler(self, split: Split, seq_len: int, batch: int) -> Sampler | BlendSampler:
        """Return the sampler of a split; DataError if a source is shorter than one sample."""
        weights = self.spec.weights
        samplers = [
            self._sampler(
                _view(part, split),
                seq_len,
                batch,
                f"{split} split" if weights is None else f"{split} split of {part.name}",
            )
            for part in self.parts
        ]
        if weights is None:
            return samplers[0]
        return BlendSampler(Blend(weights), samplers, [part.name for part in self.parts])

    def _sampler(self, view: TokenView, seq_len: int, batch: int, name: str) -> Sampler:
        spec = self.spec
        if spec.format == "chat":
            skips = spec.on_error == "skip"
            return WholeSampler(
                view, seq_len=seq_len, batch=batch, seed=spec.seed, skips=skips, name=name
            )
        return Sampler(
            view,
            seq_len=seq_len,
            batch=batch,
            seed=spec.seed,
            packing=spec.packing,
            skips=spec.on_error == "skip",
            name=name,
        )


def _told(sampler: WholeSampler, split: Split) -> str:
    """Return a line on the truncated and left-out conversations of a split, or "" if none are."""
    facts = sampler.facts()
    if not facts["cut"] and not facts["left_out"]:
        return ""
    return (
        f"{split}: {facts['cut']} of {facts['conversations']} conversations are cut to "
        f"train.seq_len = {sampler.seq_len} and {facts['left_out']} left out, of which nothing "
        f"trained would remain; {facts['tokens_cut']:,} tokens are cut off"
    )


def _view(part: BlendPart, split: Split) -> TokenView:
    return part.train if split == "train" else part.validation


@dataclass(frozen=True, eq=False)
class _Opened:
    """One opened source: name, shards, tokenizer, digest, token counts, store folder and files.

    `counts` and `folder` are None for a Megatron pair.
    """

    name: str
    shards: tuple[Shard, ...]
    tokenizer: Tokenizer
    digest: str
    counts: NDArray[np.int64] | None
    folder: Path | None
    files: dict[str, str]


def open_data(
    spec: DataSpec, cache: Path, vocab_size: int | None = None, progress: Say | None = None
) -> Dataset | StreamedDataset:
    """Open the data of a DataSpec, preparing an indexed store under `cache` if necessary.

    A prepared store or a Megatron pair is read in place. Several sources are concatenated in the
    given order, or drawn from by weight. `vocab_size` is the model's, which must be at least the
    tokenizer's. `progress` receives lines of text about a preparation. Raises
    DataError for anything missing, corrupt or empty, and for sources with different tokenizers.
    """
    if spec.streaming:
        return open_stream(spec, vocab_size)
    opened = [_open(name, spec, cache, progress) for name in spec.sources]
    if not opened:
        raise DataError("data.source names nothing")
    first = opened[0]
    for source in opened[1:]:
        if source.tokenizer.digest != first.tokenizer.digest:
            raise DataError(
                f"sources of different tokenizers cannot be mixed: {first.name} has "
                f"{first.tokenizer.name}, {source.name} has {source.tokenizer.name}"
            )
    tokenizer_size = first.tokenizer.vocab_size
    check_vocabulary(first.tokenizer, vocab_size)
    identity = {
        "tokenizer": first.tokenizer.digest,
        "data": sha256_bytes("\n".join(source.digest for source in opened).encode()),
        **({} if spec.weights is None else {"weights": ",".join(map(repr, spec.weights))}),
        "validation": str(spec.validation),
        "packing": spec.packing,
        "seed": str(spec.seed),
        **({} if spec.format == "text" else {"format": spec.format}),
    }
    return Dataset(
        spec=spec,
        parts=tuple(_parts(opened, spec, tokenizer_size)),
        tokenizer=first.tokenizer,
        vocab_size=tokenizer_size,
        unigram_entropy=_entropy(opened, spec),
        identity=identity,
        folders=tuple(source.folder for source in opened if source.folder is not None),
        files={name: digest for source in opened for name, digest in source.files.items()},
        is_remote=any(map(is_url, spec.sources)),
    )


def _entropy(opened: list[_Opened], spec: DataSpec) -> float | None:
    """Return the unigram entropy in nats of the weighted sources; None if one has no counts."""
    counts = [source.counts for source in opened if source.counts is not None]
    if len(counts) < len(opened):
        return None
    weights = [int(count.sum()) for count in counts] if spec.weights is None else spec.weights
    pairs = zip(weights, counts, strict=True)
    return entropy_of(np.sum([weight * count / count.sum() for weight, count in pairs], axis=0))


def _parts(opened: list[_Opened], spec: DataSpec, vocab_size: int) -> Iterator[BlendPart]:
    """Yield all sources concatenated as one part or, if drawn by weight, one part per source."""
    divides = spec.format == "text"
    if spec.weights is None:
        shards = [shard for source in opened for shard in source.shards]
        yield BlendPart("", *split(shards, spec.validation, vocab_size, divides=divides))
        return
    for source in opened:
        parts = split(source.shards, spec.validation, vocab_size, divides=divides)
        yield BlendPart(source.name, *parts)


def refuse_changed(recorded: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Raise DataError if the data of a resumed run differs from the data that it started with.

    Both arguments are the `identity` of a data set; the message names each difference with both
    values.
    """
    changed = [key for key in recorded if recorded[key] != current.get(key)]
    if changed:
        pairs = [f"{key} was {recorded[key]:.16}, is {current.get(key)!s:.16}" for key in changed]
        raise DataError(f"the run was started on other data: {'; '.join(pairs)}")


def check_sources(spec: DataSpec, cache: Path, vocab_size: int) -> None:
    """Raise DataError if `open_data` would for missing files, or for the tokenizer.

    This finds what can be found without reading documents: missing files, and a tokenizer that is
    missing or larger than the model's vocabulary.
    """
    is_checked = False
    for name in spec.sources:
        if is_url(name):
            open_remote(StorePath.parse(name), cache, spec.cache_size)
            continue
        if is_store(Path(name)) or _pair_of(name) is not None:
            continue
        source = source_of(name, spec, cache)
        if isinstance(source, Files):
            source.parts()
        if not is_checked:
            check_vocabulary(load_tokenizer(spec.tokenizer, spec.eos, spec.bos), vocab_size)
            is_checked = True


def is_prepared(name: str) -> bool:
    """Whether a source is an indexed store: a folder with a manifest, or any URL."""
    return is_url(name) or is_store(Path(name))


def _pair_of(name: str) -> Path | None:
    """Return the path prefix of the Megatron pair that a source names, or None."""
    return None if name in ("stdlib", "tinystories") else megatron_prefix(Path(name))


def source_of(name: str, spec: DataSpec, cache: Path) -> Source:
    """Return the source that a name in `data.source` denotes, without reading it.

    Names are "stdlib", "tinystories[:PART]", "hf:NAME" and paths.
    """
    kind, _, argument = name.partition(":")
    if spec.format == "chat" and kind in ("stdlib", "tinystories"):
        raise DataError(f"data.format = 'chat': {name} is text, not conversations")
    if name == "stdlib":
        return Stdlib()
    if kind == "tinystories":
        return TinyStories(cache / "downloads", argument or "train")
    if kind == "hf":
        return HuggingFace.parse(argument, spec.text_key, spec.format)
    return Files((Path(name),), spec.text_key, spec.separator, spec.format)


def _open(name: str, spec: DataSpec, cache: Path, say: Say | None) -> _Opened:
    path = Path(name)
    if is_url(name):
        root = StorePath.parse(name)
        opened = _open_prepared(name, open_remote(root, cache, spec.cache_size), spec)
        files = {str(root / Path(file).name): digest for file, digest in opened.files.items()}
        return replace(opened, files=files)
    if is_store(path):
        return _open_prepared(name, open_store(path), spec)
    prefix = _pair_of(name)
    if prefix is not None:
        if spec.format == "chat":
            raise DataError(f"data.format = 'chat': {name} is a Megatron pair, which has no masks")
        return _open_pair(name, prefix, spec)
    source = source_of(name, spec, cache)
    encoder = Encoding(spec.tokenizer, spec.eos, spec.format, spec.chat_template, spec.bos).load()
    passes = [spec.on_error] if spec.on_error != "stop" else []
    key = json.dumps([FORMAT, source.fingerprint(), encoder.digest, *passes], sort_keys=True)
    folder = cache / "stores" / sha256_bytes(key.encode())[:24]
    if is_store(folder):
        store = open_store(folder)  # without the lock, which a read-only cache would not give
        if say is not None:
            for line in read_notes(folder):
                _about(name, say)(f"note: {line}")
    else:
        store = prepare(
            [source],
            spec.tokenizer,
            folder,
            eos=spec.eos,
            workers=spec.workers,
            progress=_steps(f"preparing {name}", say),
            say=None if say is None else _about(name, say),
            on_error=spec.on_error,
            form=spec.format,
            chat_template=spec.chat_template,
            bos=spec.bos,
        )
    digest, tokenizer = store.digest, encoder.tokenizer
    return _Opened(name, store.shards, tokenizer, digest, store.counts(), folder, {name: digest})


def _open_prepared(name: str, store: Store, spec: DataSpec) -> _Opened:
    if store.manifest.form != spec.format:
        content = "conversations" if store.manifest.form == "chat" else "texts"
        rule = f"data.format = {spec.format!r}, but the store {store.folder} holds {content}"
        raise DataError(refusal(rule, legal=[f"data.format = {store.manifest.form!r}"]))
    # The default tokenizer stands for "the store's": a resolved config spells defaults out, so
    # that one which was asked for cannot be told from one which was not.
    if spec.tokenizer != DataSpec.model_fields["tokenizer"].default:
        config_tokenizer = load_tokenizer(spec.tokenizer, spec.eos, spec.bos)
        record = store.manifest.tokenizer
        if config_tokenizer.digest != record.digest:
            raise DataError(
                f"data.tokenizer = {spec.tokenizer!r}, but the store {store.folder} was prepared "
                f"with {record.name!r} (vocabulary {record.vocab_size}, texts begin with the ids "
                f"{list(record.bos_ids)}); leave data.tokenizer out to use the store's"
            )
    tokenizer, folder = store.tokenizer(), store.folder
    files = {str(folder / record.file): record.sha256 for record in store.manifest.files()}
    return _Opened(name, store.shards, tokenizer, store.digest, store.counts(), folder, files)


def _open_pair(name: str, prefix: Path, spec: DataSpec) -> _Opened:
    pair = open_megatron(prefix)
    tokenizer = load_tokenizer(spec.tokenizer, spec.eos, spec.bos)
    # The pair does not say how it was tokenised. All ids are checked as they are read; a look at
    # the first ones tells of a wrong tokenizer before anything starts.
    view, _ = split([pair.shard], 0.0, tokenizer.vocab_size)
    try:
        view.read(0, min(len(view), PROBE_TOKENS))
    except DataError as error:
        raise DataError(
            f"{error}. Is data.tokenizer = {spec.tokenizer!r} what {name} was tokenised with?"
        ) from error
    begin = view.read(0, min(len(view), len(tokenizer.bos_ids)))
    if spec.bos is None and tuple(begin.tolist()) != tokenizer.bos_ids:
        tokenizer = load_tokenizer(spec.tokenizer, spec.eos, bos=False)  # as the pair was written
    return _Opened(name, (pair.shard,), tokenizer, pair.digest, None, None, pair.files)


def _about(name: str, say: Say) -> Say:
    return lambda text: say(f"{name}: {text}")


def _steps(task: str, say: Say | None) -> Progress | None:
    """Return a callback `(done, total)` that reports each tenth of the work, at most once a second.

    None if there is no `say` to report to.
    """
    if say is None:
        return None
    last_tenth, last_time_s = -1, time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last_tenth, last_time_s
        tenth, time_s = 10 * done // max(1, total), time.monotonic()
        if tenth > last_tenth and time_s - last_time_s >= SAY_EVERY_S:
            last_tenth, last_time_s = tenth, time_s
            say(f"{task}: {10 * tenth}% of {format_bytes(total)}")

    return report
