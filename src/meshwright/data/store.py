"""The indexed store: a folder of token shards, their document offsets, and a manifest.

    manifest.json      the content, with the size and SHA-256 of every other file
    tokens-00000.bin   token ids, little endian, uint16 or uint32 by the vocabulary's size
    docs-00000.idx     where each document ends, in tokens of its shard, int64
    mask-00000.bin     of conversations: which tokens are trained on, a byte of 0 or 1 each
    counts.bin         how often each id occurs, int64 [vocab_size]
    tokenizer.json     the tokenizer, if it is a file; with conversations also the chat template
                       and the special tokens that it names, in the files that transformers reads

Each document ends with the tokenizer's end-of-document id, or as its chat template ends it. No
document crosses shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from meshwright.data.encoders import Encoder, encoder_of
from meshwright.data.tokenizers import BytesTokenizer, JsonTokenizer, TiktokenTokenizer, Tokenizer
from meshwright.data.view import Blocks, Items, Mask, Shard, map_array
from meshwright.errors import DataError, refusal
from meshwright.files import BLOCK_BYTES, hash_file, plain_name, reading, sha256_bytes
from meshwright.parsing import parse_json
from meshwright.spec.kinds import Spec
from meshwright.spec.training import DataFormat
from meshwright.units import MIB

FORMAT = 1
MANIFEST = "manifest.json"
COUNTS = "counts.bin"
TOKENIZER = "tokenizer.json"
CHUNK_TOKENS = MIB
Progress = Callable[[int, int], None]


class FileRecord(Spec):
    """A file of the store: its name without a folder, size, SHA-256, and CRC-32 of each MiB."""

    file: str
    bytes: int = Field(ge=0)
    sha256: str
    blocks: tuple[int, ...] = ()


class ShardRecord(Spec):
    """A shard: its files, its size in tokens and documents, and its largest token id.

    `supervised` is the number of tokens that are trained on, if the shard has a loss mask.
    """

    tokens_file: FileRecord
    index_file: FileRecord
    mask_file: FileRecord | None = None
    supervised: int | None = None
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    max_id: int = Field(ge=-1)

    def files(self) -> list[FileRecord]:
        """Return the records of the shard's files."""
        return [*self.items_files(), self.index_file]

    def items_files(self) -> list[FileRecord]:
        """Return the records of the files that grow with the tokens: ids and loss mask."""
        return [self.tokens_file, *([] if self.mask_file is None else [self.mask_file])]


class TokenizerRecord(Spec):
    """The tokenizer that the store was written with; `file` is its copy in the store, if any."""

    kind: Literal["bytes", "tiktoken", "json"]
    name: str
    digest: str
    vocab_size: int = Field(gt=0)
    eos_id: int = Field(ge=0)
    eos_token: str
    bos_ids: tuple[int, ...] = ()
    file: FileRecord | None = None


class Manifest(Spec):
    """The description of a store; `entropy` is that of the distribution of token ids, in nats."""

    format: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(gt=0)
    tokenizer: TokenizerRecord
    sources: tuple[dict[str, Any], ...]
    shards: tuple[ShardRecord, ...]
    documents: int = Field(gt=0)
    tokens: int = Field(gt=0)
    entropy: float = Field(ge=0)
    counts: FileRecord
    template_files: tuple[FileRecord, ...] = ()

    @property
    def form(self) -> DataFormat:
        """The `data.format` that the store was prepared with."""
        return "chat" if self.template_files else "text"

    def files(self) -> Iterator[FileRecord]:
        """Yield the record of every file except the manifest."""
        for shard in self.shards:
            yield from shard.files()
        yield self.counts
        if self.tokenizer.file is not None:
            yield self.tokenizer.file
        yield from self.template_files

    def to_json(self) -> bytes:
        """Return the content of manifest.json, which begins with a digest of the other fields."""
        body = self.model_dump(mode="json")
        return json.dumps({"digest": _digest(body), **body}, indent=1).encode() + b"\n"


@dataclass(frozen=True, eq=False)
class Store:
    """An opened store: its manifest and its memory-mapped shards."""

    folder: Path
    manifest: Manifest
    shards: tuple[Shard, ...]

    @property
    def digest(self) -> str:
        """A digest of the store's content: the tokens, their documents and the tokenizer."""
        names = [record.sha256 for record in self.manifest.files()]
        return sha256_bytes("\n".join([self.manifest.tokenizer.digest, *names]).encode())

    def tokenizer(self) -> Tokenizer:
        """Return the store's tokenizer; raises DataError if its digest is not the recorded one."""
        record = self.manifest.tokenizer
        loaded: Tokenizer
        if record.kind == "bytes":
            loaded = BytesTokenizer()
        elif record.kind == "tiktoken":
            loaded = TiktokenTokenizer()
        else:
            file = self.folder / TOKENIZER
            loaded = JsonTokenizer(file, record.name, record.eos_token, record.bos_ids)
        if loaded.digest != record.digest:
            raise DataError(
                f"the tokenizer of {self.folder} ({record.name}) has changed: "
                f"digest {loaded.digest}, the manifest says {record.digest}"
            )
        return loaded

    def encoder(self) -> Encoder:
        """Return the encoder that the store was written with.

        Raises DataError as `tokenizer` does.
        """
        return encoder_of(self.tokenizer(), self.manifest.form)

    def counts(self) -> NDArray[np.int64]:
        """Return how often each id occurs, int64 [vocab_size].

        Raises DataError if the file is damaged.
        """
        with reading(self.folder / COUNTS):
            content = (self.folder / COUNTS).read_bytes()
        if sha256_bytes(content) != self.manifest.counts.sha256:
            raise _refused(self.folder, [f"{COUNTS} is damaged: its checksum differs"])
        return np.frombuffer(content, dtype="<i8").astype(np.int64)


@dataclass(frozen=True)
class Verification:
    """The number of files and bytes that were read, and the problems found; empty if intact."""

    files: int
    bytes: int
    problems: tuple[str, ...]


def is_store(folder: Path) -> bool:
    """Return whether a folder has a manifest, so is meant to be an indexed store."""
    return (folder / MANIFEST).is_file()


class Elsewhere(Protocol):
    """The token ids and loss masks of a store whose folder has only its other files."""

    def problem(self, record: FileRecord) -> str | None:
        """Return what is wrong with the size of a file, or None."""

    def items(self, record: FileRecord, dtype: str) -> Items:
        """Return the numbers of a file, which verify themselves as they are read."""


def open_store(folder: Path, elsewhere: Elsewhere | None = None) -> Store:
    """Open an indexed store after all checks that need not read the tokens.

    Checked are the manifest's digest, file names, all sizes and counts, the document ends and the
    recorded largest id. Raises DataError with the file and both values. Tokens are compared with
    their checksums as they are read; `verify` reads all of them.
    """
    manifest = read_manifest(folder)
    large = {file.file for shard in manifest.shards for file in shard.items_files()}
    problems = []
    for record in manifest.files():
        if elsewhere is not None and record.file in large:
            problem = elsewhere.problem(record)
        else:
            problem = _present(folder, record)
        problems += [problem] if problem else []
    problems += _inconsistent(manifest)
    if problems:
        raise _refused(folder, problems)
    shards = tuple(_open_shard(folder, manifest, record, elsewhere) for record in manifest.shards)
    for check in (_ends, _changed):
        pairs = zip(shards, manifest.shards, strict=True)
        if problems := [problem for pair in pairs for problem in check(*pair)]:
            raise _refused(folder, problems)
    return Store(folder, manifest, shards)


def verify(folder: Path, progress: Progress | None = None) -> Verification:
    """Read every byte of a store and return the problems found, without raising them.

    Reports the damaged blocks of a file and the position of an id outside the vocabulary.
    `progress` is called with the bytes read so far and the total.
    """
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        return Verification(1, 0, (str(error),))
    problems = _inconsistent(manifest)
    records = list(manifest.files())
    total, done = sum(record.bytes for record in records), 0
    usable = set()
    for record in records:
        problem = _present(folder, record) or _damage(folder, record)
        usable |= {record.file} if _present(folder, record) is None else set()
        problems += [problem] if problem else []
        done += record.bytes
        if progress:
            progress(done, total)
    for shard in manifest.shards:
        if {record.file for record in shard.files()} <= usable and not problems_of(shard):
            opened = _open_shard(folder, manifest, shard)
            problems += [*_ends(opened, shard), *_ids(opened, manifest.vocab_size)]
    return Verification(len(records) + 1, done, tuple(problems))


def entropy_of(counts: NDArray[Any]) -> float:
    """Return the entropy of a distribution given by counts, in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def dtype_of(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the integer type in which token ids of this vocabulary are stored."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def problems_of(record: ShardRecord, width: int | None = None) -> list[str]:
    """Return how the numbers in a shard's record contradict each other.

    `width` is the bytes of a token id; None accepts 2 or 4.
    """
    tokens, index = record.tokens_file, record.index_file
    problems = []
    if record.tokens == 0 or record.documents == 0:
        problems.append(f"{tokens.file} is empty")
    if tokens.bytes not in (
        [record.tokens * width] if width else [record.tokens * 2, record.tokens * 4]
    ):
        problems.append(f"{tokens.file} has {tokens.bytes} bytes for {record.tokens} tokens")
    if record.mask_file is not None and record.mask_file.bytes != record.tokens:
        problems.append(
            f"{record.mask_file.file} has {record.mask_file.bytes} bytes, not one a token"
        )
    if index.bytes != 8 * record.documents:
        problems.append(f"{index.file} has {index.bytes} bytes for {record.documents} documents")
    return problems


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _refused(folder: Path, problems: list[str]) -> DataError:
    omitted = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return DataError(
        f"the store {folder} cannot be used: {'; '.join(problems[:3])}{omitted}. "
        "Restore the files, or remove the folder and prepare it again"
    )


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a store; raises DataError if it is missing or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        rule = f"{folder} is not an indexed store: it has no {MANIFEST}"
        if folder.is_file():
            rule = f"{folder} is a file, and an indexed store is a folder"
        makes = (
            f"`meshwright data prepare OUT --source {folder}` makes one of texts or rows, with "
            "--format chat of conversations"
        )
        raise DataError(refusal(rule, hint=makes if folder.exists() else ""))
    with reading(path):
        content = path.read_bytes()
    try:
        body = parse_json(content)
        if not isinstance(body, dict):
            raise ValueError("not a JSON object")
        stated = body.pop("digest", None)
        if stated != (digest := _digest(body)):
            raise ValueError(f"its content has digest {digest}, it states {stated}")
        manifest = Manifest.model_validate_json(json.dumps(body))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{path} is not a manifest of format {FORMAT}: {where}: {first['msg']}"
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is corrupt: {error}") from error
    for record in manifest.files():
        if not plain_name(record.file):
            raise DataError(f"{path} names {record.file!r}, which is not a plain file name")
    return manifest


def _inconsistent(manifest: Manifest) -> list[str]:
    """Return how the numbers in a manifest contradict each other."""
    width = np.dtype(manifest.dtype).itemsize
    problems = [problem for shard in manifest.shards for problem in problems_of(shard, width)]
    problems += [
        f"{shard.tokens_file.file} has id {shard.max_id}, vocabulary is {manifest.vocab_size}"
        for shard in manifest.shards
        if shard.max_id >= manifest.vocab_size
    ]
    problems += [
        f"{shard.tokens_file.file} has a mask without a chat template, or none beside one"
        for shard in manifest.shards
        if (shard.mask_file is None) == bool(manifest.template_files)
    ]
    sums = {
        "tokens": (manifest.tokens, sum(shard.tokens for shard in manifest.shards)),
        "documents": (manifest.documents, sum(shard.documents for shard in manifest.shards)),
        "vocab_size": (manifest.vocab_size, manifest.tokenizer.vocab_size),
        "bytes of counts": (manifest.counts.bytes, 8 * manifest.vocab_size),
    }
    problems += [
        f"{MANIFEST}: {quantity} {a}, should be {b}" for quantity, (a, b) in sums.items() if a != b
    ]
    return problems


def _present(folder: Path, record: FileRecord) -> str | None:
    """Return the problem of a file that is missing, a symbolic link or of another size, or None."""
    path = folder / record.file
    if path.is_symlink():
        return f"{record.file} is a symbolic link; a store holds its files itself"
    if not path.is_file():
        return f"{record.file} is missing"
    file_bytes = path.stat().st_size
    return (
        f"{record.file} has {file_bytes} bytes, should be {record.bytes}"
        if file_bytes != record.bytes
        else None
    )


def _damage(folder: Path, record: FileRecord) -> str | None:
    """Return which blocks of a file differ from their checksums; None if it is intact."""
    current = hash_file(folder / record.file)
    if current.sha256 == record.sha256:
        return None
    pairs = enumerate(zip(current.blocks, record.blocks, strict=False))
    bad = [number for number, (crc, recorded_crc) in pairs if crc != recorded_crc]
    if not bad:
        return f"{record.file} is damaged: SHA-256 {current.sha256}, should be {record.sha256}"
    ranges = ", ".join(
        f"{n * BLOCK_BYTES}-{min((n + 1) * BLOCK_BYTES, record.bytes) - 1}" for n in bad[:4]
    )
    omitted = f" and {len(bad) - 4} more blocks" if len(bad) > 4 else ""
    return f"{record.file} is damaged within bytes {ranges}{omitted}: its SHA-256 differs"


def _open_shard(
    folder: Path, manifest: Manifest, record: ShardRecord, elsewhere: Elsewhere | None = None
) -> Shard:
    path = folder / record.tokens_file.file
    dtype = np.dtype(manifest.dtype).newbyteorder("<").str
    ends = map_array(folder / record.index_file.file, "<i8", record.documents)
    file, mask = record.tokens_file, None
    if elsewhere is not None:
        if record.mask_file is not None:
            mask = Mask(elsewhere.items(record.mask_file, "u1"), None)
        return Shard(path, elsewhere.items(file, dtype), ends, None, mask)
    tokens = map_array(path, dtype, record.tokens)
    if record.mask_file is not None:
        mask_path = folder / record.mask_file.file
        mask_bytes = map_array(mask_path, "u1", record.tokens)
        blocks = Blocks(mask_path, mask_bytes, record.mask_file.blocks, record.mask_file.sha256)
        mask = Mask(mask_bytes, blocks)
    return Shard(path, tokens, ends, Blocks(path, tokens, file.blocks, file.sha256), mask)


def _ends(shard: Shard, record: ShardRecord) -> list[str]:
    """Return the problem of document ends that do not increase up to the number of tokens."""
    lengths = np.diff(shard.ends, prepend=0)
    name = record.index_file.file
    if (lengths <= 0).any():
        first = int(np.argmax(lengths <= 0))
        before = int(shard.ends[first - 1]) if first else 0
        return [
            f"{name}: document {first} ends at token {shard.ends[first]}, "
            f"the one before at {before}"
        ]
    if shard.ends[-1] != record.tokens:
        return [f"{name}: the last document ends at token {shard.ends[-1]} of {record.tokens}"]
    return []


def _changed(shard: Shard, record: ShardRecord) -> list[str]:
    """Return the problem of document ends that differ from their checksums."""
    file = record.index_file
    blocks = Blocks(Path(file.file), shard.ends, file.blocks, file.sha256)
    problem = blocks.problem(0, len(shard.ends))
    return [problem] if problem else []


def _ids(shard: Shard, vocab_size: int) -> list[str]:
    """Return a line on the first token id outside the vocabulary, if any."""
    for start in range(0, len(shard.tokens), CHUNK_TOKENS):
        outside = shard.tokens[start : start + CHUNK_TOKENS] >= vocab_size
        if outside.any():
            token = start + int(np.argmax(outside))
            token_id = int(shard.tokens[token : token + 1][0])
            return [
                f"id {token_id} at token {token} of {shard.path.name}, vocabulary is {vocab_size}"
            ]
    return []
