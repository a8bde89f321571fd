"""Writes documents as an indexed store: in parallel, resumable, with the same bytes every time."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from meshwright.data.corpora import Files, Skip, Source, SourcePart
from meshwright.data.encoders import Encoder, Encoding, worded
from meshwright.data.formats import END_OF_TEXT
from meshwright.data.store import (
    CHUNK_TOKENS,
    COUNTS,
    FORMAT,
    MANIFEST,
    TOKENIZER,
    FileRecord,
    Manifest,
    Progress,
    ShardRecord,
    Store,
    TokenizerRecord,
    dtype_of,
    entropy_of,
    is_store,
    open_store,
)
from meshwright.data.tokenizers import Tokenizer
from meshwright.data.view import map_array
from meshwright.errors import DataError
from meshwright.files import (
    AtomicFile,
    hash_file,
    locked,
    plain_name,
    read_bytes,
    reading,
    remove_temporaries,
    sha256_bytes,
    writable_folder,
    write_atomic,
)
from meshwright.parsing import parse_json
from meshwright.spec.training import DataFormat, OnError
from meshwright.units import MIB, counted


def seal(
    out: Path,
    fingerprints: tuple[dict[str, object], ...],
    encoder: Encoder,
    records: list[ShardRecord],
) -> None:
    """Complete a store: write the counts, the tokenizer, the chat template and, last, the manifest.

    Raises DataError if there is no token at all.
    """
    tokenizer = encoder.tokenizer
    full = [record for record in records if record.tokens]
    if not full:
        raise DataError(f"the corpus is empty: {json.dumps(fingerprints, sort_keys=True)}")
    for record in records:
        if not record.tokens:  # all of its documents were blank
            for file in record.files():
                (out / file.file).unlink(missing_ok=True)
    counts = _count(out, full, tokenizer.vocab_size)
    with AtomicFile(out / COUNTS) as counts_file:
        counts_file.write(counts.astype("<i8").tobytes())
    copy = None
    if tokenizer.file is not None:
        with AtomicFile(out / TOKENIZER) as copied, reading(tokenizer.file):
            copied.write(read_bytes(tokenizer.file))
        copy = file_record(copied)
    templates = []
    if encoder.template is not None:
        for name, content in encoder.template.files().items():
            with AtomicFile(out / name) as written:
                written.write(content)
            templates.append(file_record(written))
    manifest = Manifest(
        dtype=dtype_of(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        tokenizer=TokenizerRecord(
            kind=tokenizer.kind,  # type: ignore[arg-type]
            name=tokenizer.name,
            digest=tokenizer.digest,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            eos_token=tokenizer.eos_token,
            bos_ids=tokenizer.bos_ids,
            file=copy,
        ),
        sources=fingerprints,
        shards=tuple(full),
        documents=sum(record.documents for record in full),
        tokens=sum(record.tokens for record in full),
        entropy=entropy_of(counts),
        counts=file_record(counts_file),
        template_files=tuple(templates),
    )
    write_atomic(out / MANIFEST, manifest.to_json())


def _count(out: Path, records: list[ShardRecord], vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, dtype=np.int64)
    dtype = np.dtype(dtype_of(vocab_size)).newbyteorder("<").str
    for record in records:
        tokens = map_array(out / record.tokens_file.file, dtype, record.tokens)
        for start in range(0, record.tokens, CHUNK_TOKENS):
            counts += np.bincount(tokens[start : start + CHUNK_TOKENS], minlength=vocab_size)
    return counts


def file_record(file: AtomicFile) -> FileRecord:
    """Return the record of a file that has just been written."""
    assert plain_name(file.path.name)
    return FileRecord(
        file=file.path.name,
        bytes=file.hash.size,
        sha256=file.hash.sha256,
        blocks=file.hash.blocks,
    )


SHARD_BYTES = 64 * MIB  # of text; a shard is the unit of resuming and of parallel work
POOL_BYTES = 32 * MIB  # below this, starting processes takes longer than the work
BATCH_CHARS = MIB
SKIPPED = "skipped.txt"  # files and rows without text, a line each
NOTES = "notes.txt"  # what of conversations is not read or trained, a line each
Say = Callable[[str], None]


@dataclass(frozen=True)
class _Task:
    """One shard to write: its number, the parts of sources that it contains, and the settings.

    `digest` is the encoder's and `job` identifies the whole preparation. `skips` is whether
    unreadable rows are skipped.
    """

    number: int
    pieces: tuple[tuple[Source, SourcePart], ...]
    out: Path
    encoding: Encoding
    digest: str
    job: str
    skips: bool

    @property
    def size(self) -> int:
        return sum(part.size for _, part in self.pieces)

    @property
    def tokens_name(self) -> str:
        return f"tokens-{self.number:05d}.bin"

    @property
    def index_name(self) -> str:
        return f"docs-{self.number:05d}.idx"

    @property
    def mask_name(self) -> str:
        return f"mask-{self.number:05d}.bin"

    @property
    def record_path(self) -> Path:
        return self.out / f"shard-{self.number:05d}.json"


def prepare(
    sources: Sequence[Source],
    tokenizer: str,
    out: Path,
    *,
    eos: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    say: Say | None = None,
    on_error: OnError = "stop",
    shard_bytes: int = SHARD_BYTES,
    form: DataFormat = "text",
    chat_template: str | None = None,
    bos: bool | None = None,
) -> Store:
    """Tokenize sources, in order, into an indexed store at `out`, and open it.

    With `form` "chat" the sources must yield conversations, which are rendered by the template file
    `chat_template` or else by the tokenizer's own.

    The bytes written are the same for any number of workers (None: one per core, at most one per
    shard). An interrupted preparation resumes: intact, complete shards of the same sources and
    tokenizer are reused, and a complete store of the same is returned as it is. `progress` gets the
    bytes of text done and the total; `say` gets a line on files that are not text and, with
    `on_error` "skip", on skipped files and rows, which the store's `skipped.txt` lists. Raises
    DataError for an unwritable folder, another corpus in `out`, an unreadable or empty source, or
    an unusable tokenizer.
    """
    writable_folder(out)
    encoding = Encoding(tokenizer, eos, form, chat_template, bos)
    loaded = encoding.load()
    passes = {"on_error": on_error} if on_error == "skip" else {}
    fingerprints = tuple(source.fingerprint() | passes for source in sources)
    with locked(out):
        if is_store(out):
            return _finished(out, fingerprints, loaded.digest)
        remove_temporaries(out)
        for source in sources:
            if say is not None and isinstance(source, Files):
                _say_of_files(source, say)
        job = _job(fingerprints, loaded.digest, shard_bytes)
        tasks = [
            _Task(number, pieces, out, encoding, loaded.digest, job, bool(passes))
            for number, pieces in enumerate(_plan(sources, shard_bytes))
        ]
        records = _run(tasks, loaded, workers, progress)
        skipped = [text for task in tasks for text in _skipped(task)]
        if skipped:
            write_atomic(out / SKIPPED, "".join(f"{text}\n" for text in skipped).encode())
            if say is not None:
                say(f"skipped {len(skipped)}, listed in {out / SKIPPED}; the first: {skipped[0]}")
        _keep_notes(tasks, out, say)
        seal(out, fingerprints, loaded, records)
        for task in tasks:
            task.record_path.unlink(missing_ok=True)
    return open_store(out)


def _say_of_files(source: Files, say: Say) -> None:
    """Report which files are not read, and which are split into documents by default."""
    if left := source.left_out():
        say(f"left out {_some(left)}")
    if cut := source.split_by_default():
        suffix = f" and {counted(len(cut) - 1, 'other file')}" if len(cut) > 1 else ""
        say(
            f"note: {cut[0].name}{suffix} split into documents at {END_OF_TEXT}; "
            "data.separator='' makes a file one document"
        )


def _some(files: Sequence[Path]) -> str:
    """Return a line on files that are not text: their number, their suffixes and a few names."""
    kinds = Counter(file.suffix.lower() or "no suffix" for file in files).most_common(4)
    counts = ", ".join(f"{kind} {count}" for kind, count in kinds)
    names = ", ".join(file.name for file in files[:3])
    ellipsis = ", ..." if len(files) > 3 else ""
    verb = "is" if len(files) == 1 else "are"
    return f"{counted(len(files), 'file')} that {verb} not text ({counts}): {names}{ellipsis}"


def _skipped(task: _Task) -> list[str]:
    """Return the lines on files and rows that were skipped in writing a shard."""
    with reading(task.record_path):
        return list(parse_json(read_bytes(task.record_path)).get("skipped", ()))


def _notes(tasks: Sequence[_Task]) -> list[str]:
    """Return a line on each kind of content that is not read or trained on, most frequent first."""
    counts: Counter[str] = Counter()
    for task in tasks:
        with reading(task.record_path):
            counts.update(parse_json(read_bytes(task.record_path)).get("notes", {}))
    return worded(counts)


def _keep_notes(tasks: Sequence[_Task], out: Path, say: Say | None) -> None:
    """Write the notes of all shards to the store's notes.txt, and report them."""
    notes = _notes(tasks)
    if notes:
        write_atomic(out / NOTES, "".join(f"{line}\n" for line in notes).encode())
    if say is not None:
        for line in notes:
            say(f"note: {line}")


def read_notes(folder: Path) -> list[str]:
    """Return the lines of a store's notes.txt, on conversation content not read or trained on."""
    path = folder / NOTES
    if not path.is_file():
        return []
    with reading(path):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _finished(out: Path, fingerprints: tuple[dict[str, object], ...], digest: str) -> Store:
    store = open_store(out)
    same_tokenizer = store.encoder().digest == digest
    if same_tokenizer and _plain(store.manifest.sources) == _plain(fingerprints):
        return store
    corpus = "another corpus" if same_tokenizer else "a corpus of another tokenizer"
    raise DataError(f"{out} already holds {corpus}; choose another folder or remove it")


def _plain(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _job(fingerprints: tuple[dict[str, object], ...], digest: str, shard_bytes: int) -> str:
    """Return a hash of the sources, tokenizer and shard size, by which to recognize its shards."""
    return sha256_bytes(_plain([FORMAT, fingerprints, digest, shard_bytes]).encode())


def _plan(
    sources: Sequence[Source], shard_bytes: int
) -> Iterator[tuple[tuple[Source, SourcePart], ...]]:
    """Yield the source parts of each shard: consecutive ones of at most `shard_bytes` together.

    The number of workers does not matter. A larger part is a shard alone.
    """
    group: list[tuple[Source, SourcePart]] = []
    size = 0
    for source in sources:
        for part in source.parts():
            if group and size + part.size > shard_bytes:
                yield tuple(group)
                group, size = [], 0
            group.append((source, part))
            size += part.size
    if group:
        yield tuple(group)


def _run(
    tasks: list[_Task], encoder: Encoder, workers: int | None, progress: Progress | None
) -> list[ShardRecord]:
    """Write the shards that no earlier run has completed, and return the records of all in order.

    `workers` processes write them, unless there is little text.
    """
    total = sum(task.size for task in tasks)
    records = {task.number: record for task in tasks if (record := _kept(task)) is not None}
    done = sum(task.size for task in tasks if task.number in records)
    missing = [task for task in tasks if task.number not in records]
    workers = min(workers or os.cpu_count() or 1, len(missing))
    report = progress or (lambda done, total: None)
    if workers > 1 and sum(task.size for task in missing) >= POOL_BYTES:
        # Spawned, not forked: a fork copies locks that other threads may hold.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
            running = {pool.submit(_write_alone, task): task for task in missing}
            try:
                for future in as_completed(running):
                    records[running[future].number] = future.result()
                    done += running[future].size
                    report(done, total)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    else:
        for task in missing:
            within = partial(_report_from, report, done, total)
            records[task.number] = _write(task, encoder, within)
            done += task.size
            report(done, total)
    return [records[task.number] for task in tasks]


def _report_from(report: Progress, before: int, total: int, done: int) -> None:
    report(before + done, total)


def _write_alone(task: _Task) -> ShardRecord:
    """Write a shard in a worker process, which loads the encoder itself."""
    encoder = task.encoding.load()
    if encoder.digest != task.digest:
        raise DataError(f"the tokenizer {task.encoding.tokenizer} changed while it was in use")
    return _write(task, encoder, lambda done: None)


def _write(task: _Task, encoder: Encoder, report: Callable[[int], None]) -> ShardRecord:
    """Write one shard's files, then its record, whose existence marks them as complete."""
    tokenizer = encoder.tokenizer
    dtype = np.dtype(dtype_of(tokenizer.vocab_size)).newbyteorder("<")
    lengths: list[np.ndarray] = []
    skipped: list[str] = []
    notes: Counter[str] = Counter()
    max_id, supervised = -1, 0
    skip = skipped.append if task.skips else None
    with ExitStack() as files:
        tokens = files.enter_context(AtomicFile(task.out / task.tokens_name))
        mask = None
        if encoder.template is not None:
            mask = files.enter_context(AtomicFile(task.out / task.mask_name))
        for documents, done in _batches(task, skip):
            encoded = encoder.encode(documents, skip)
            if len(encoded.ids):
                max_id = max(max_id, _largest(encoded.ids, tokenizer))
            tokens.write(encoded.ids.astype(dtype).tobytes())
            if mask is not None and encoded.mask is not None:
                mask.write(encoded.mask.astype(np.uint8).tobytes())
                supervised += int(encoded.mask.sum())
            lengths.append(encoded.lengths)
            notes.update(encoded.notes)
            report(done)
    ends = np.cumsum(np.concatenate([np.empty(0, dtype=np.int64), *lengths]), dtype="<i8")
    with AtomicFile(task.out / task.index_name) as index:
        index.write(ends.tobytes())
    record = ShardRecord(
        tokens_file=file_record(tokens),
        index_file=file_record(index),
        mask_file=None if mask is None else file_record(mask),
        supervised=None if mask is None else supervised,
        tokens=int(ends[-1]) if len(ends) else 0,
        documents=len(ends),
        max_id=max_id,
    )
    body = {"job": task.job, "record": record.model_dump(mode="json"), "skipped": skipped}
    body |= {"notes": notes}
    write_atomic(task.record_path, json.dumps(body).encode())
    return record


def _largest(ids: np.ndarray, tokenizer: Tokenizer) -> int:
    """Return the largest id; raises DataError if an id is outside the tokenizer's vocabulary."""
    if ids.max() >= tokenizer.vocab_size or ids.min() < 0:
        raise DataError(
            f"tokenizer {tokenizer.name} gave an id outside its vocabulary of "
            f"{tokenizer.vocab_size} (ids {ids.min()} to {ids.max()})"
        )
    return int(ids.max())


def _batches(task: _Task, skip: Skip | None) -> Iterator[tuple[list[str], int]]:
    """Yield documents in batches of about `BATCH_CHARS`, with the bytes of completed parts."""
    texts: list[str] = []
    size = done = 0
    for source, part in task.pieces:
        for text in source.documents(part, skip):
            texts.append(text)
            size += len(text)
            if size >= BATCH_CHARS:
                yield texts, done
                texts, size = [], 0
        done += part.size
    if texts:
        yield texts, done


def _kept(task: _Task) -> ShardRecord | None:
    """Return the record of a shard that an earlier run completed; None if it must be written."""
    if not task.record_path.is_file():
        return None
    try:
        with reading(task.record_path):
            body = parse_json(read_bytes(task.record_path))
        if body["job"] != task.job:
            return None
        record = ShardRecord.model_validate_json(json.dumps(body["record"]))
        names = (task.tokens_name, task.index_name, task.mask_name)
        for stated, name in zip(record.files(), names, strict=False):
            if stated.file != name or hash_file(task.out / name).sha256 != stated.sha256:
                return None
    except (ValueError, KeyError, TypeError, ValidationError, DataError):
        return None
    return record
