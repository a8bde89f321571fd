"""The last steps of writing a store: counts, copies of the tokenizer's files, the manifest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from meshwright.data.encoders import Encoder
from meshwright.data.store import (
    CHUNK_TOKENS,
    COUNTS,
    MANIFEST,
    TOKENIZER,
    FileRecord,
    Manifest,
    ShardRecord,
    TokenizerRecord,
    dtype_of,
    entropy_of,
)
from meshwright.data.view import map_array
from meshwright.errors import DataError
from meshwright.files import AtomicFile, plain_name, read_bytes, reading, write_atomic


def seal(
    out: Path,
    fingerprints: tuple[dict[str, object], ...],
    encoder: Encoder,
    records: list[ShardRecord],
) -> None:
    """Write the counts, copies of the tokenizer and its chat template and, last, the manifest.

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
