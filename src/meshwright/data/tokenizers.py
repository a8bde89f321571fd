"""Tokenizers (bytes, GPT-2's through tiktoken, any `tokenizer.json`), and the training of a BPE."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError, either, nearest, refusal
from meshwright.files import (
    read_bytes,
    read_text,
    reading,
    sha256_bytes,
    writable_folder,
    write_atomic,
)
from meshwright.parsing import parse_json
from meshwright.spec import hub
from meshwright.spec.resolve import lacks_tokenizer_json
from meshwright.units import MIB

_LONGEST: Final = 10_000  # characters; those of known tokenizers have some hundred
# Parts of a regex: an escape or class, start and end of a group, a repetition, an alternative.
_PART: Final = re.compile(
    r"(?P<atom>\\.|\[(?:\\.|\[:\^?\w+:\]|[^\]\\])*\])|(?P<open>\((?:\?(?:[:=!>]|<[=!]|[a-z-]+:?))?)"
    r"|(?P<close>\))|(?P<often>[*+]|\{\d*,\})(?P<keeps>\+?)|(?P<or>\|)|(?P<other>.)",
    re.DOTALL,
)


def check_patterns(content: bytes) -> None:
    """Raise `ValueError` if a tokenizer.json has a regular expression of exponential matching time.

    The time can double with each character if an unbounded repetition applies to a group that
    contains another one, or alternatives: `(a+)+`, `(a|a)*`.
    """
    if b'"Regex"' not in content:
        return
    for pattern in _patterns(parse_json(content)):
        if len(pattern) > _LONGEST:
            raise ValueError(f"a pattern has {len(pattern)} characters; at most {_LONGEST}")
        if group := _doubling(pattern):
            raise ValueError(
                f"the pattern {pattern!r:.200} repeats the group {group!r:.100}, which can be "
                "matched in more than one way: a text can make it take forever"
            )


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        regex = value.get("Regex")
        if isinstance(regex, str):
            yield regex
        for key, child in value.items():
            if key not in ("vocab", "merges"):
                yield from _patterns(child)
    elif isinstance(value, list):
        for child in value:
            yield from _patterns(child)


def _doubling(pattern: str) -> str:
    """Return the first group of a regular expression that can take exponential time, or ""."""
    opened: list[tuple[int, bool]] = []  # where a group begins, and whether it can match in ways
    many, closed = False, (0, 0, False)
    for part in _PART.finditer(pattern):
        if part["open"]:
            opened.append((part.start(), many))
            many = False
        elif part["close"] and opened:
            start, before = opened.pop()
            closed = (start, part.end(), many)
            many = many or before
        elif part["often"]:
            if closed[1] == part.start() and closed[2] and not part["keeps"]:
                return pattern[closed[0] : part.end()]
            many = True
        elif part["or"]:
            many = True
    return ""


def byte_level_json(ranks: Mapping[bytes, int], eos: str, eos_id: int) -> bytes:
    """Return the `tokenizer.json` of a byte-level BPE, given the rank of each token.

    As in tiktoken's vocabularies, a token's id is also its merge rank. Texts are split as in GPT-2.
    `eos` is the special token, whose id must be the one after the last. With single bytes only,
    there are no merges.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    characters = byte_characters()

    def spelled(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    merges = [(spelled(left), spelled(right)) for left, right in merges_of(ranks)]
    # Like tiktoken, which looks a whole word up before it merges anything.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(eos, special=True, normalized=False)])
    if backend.token_to_id(eos) != eos_id:
        raise ValueError(f"{eos} got id {backend.token_to_id(eos)}, not {eos_id}")
    return backend.to_str(pretty=True).encode()


def byte_characters() -> list[str]:
    """Return the printable character by which GPT-2's files write each of the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pair of tokens that merges into each token of several bytes, in order of rank.

    The pair is what merges of lower rank make of the token's bytes; in a trained BPE these always
    leave two parts.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _merged(ranks, token, below=rank)
            merges.append((left, right))
    return merges


def _merged(ranks: Mapping[bytes, int], token: bytes, below: int) -> list[bytes]:
    parts = [token[index : index + 1] for index in range(len(token))]
    while True:
        pairs = [ranks.get(left + right, below) for left, right in pairwise(parts)]
        best = min(pairs, default=below)
        if best >= below:
            return parts
        index = pairs.index(best)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


BYTES_EOS = 256
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|im_end|>")
# What a token may be called that ends a document, most likely first: names without what encloses
# them. After those of whole texts come those of a turn in a chat, then BERT's of a part.
_ENDS: Final = (
    "/(s|doc|document|text)|eos|eod|end(of)?(text|doc|document|sequence|sentence)",
    "eo[mt](id)?|imend|end|stop|end(of)?(turn|message)|(turn|message)end",
    "sep",
)
# A longer text is encoded in pieces cut at line ends, since a BPE library holds many bytes of
# bookkeeping per character. Ids can differ from those of the undivided text at such a cut only.
PIECE_CHARS = 4 * MIB


class Tokenizer(ABC):
    """Converts texts to token ids and back.

    Tokenizers with the same `digest`, a SHA-256, give the same ids. `eos_id` ends each document.
    `file` is the `tokenizer.json`, if there is one. Special tokens in a text are never recognized:
    a document that quotes `</s>` does not end there. `bos_ids` begin each text (empty for most
    tokenizers); `own_bos_ids` are those that its files ask for.
    """

    kind: str
    name: str
    vocab_size: int
    eos_id: int
    eos_token: str
    digest: str
    file: Path | None = None
    bos_ids: tuple[int, ...] = ()
    own_bos_ids: tuple[int, ...] = ()

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without BOS and EOS."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, with replacement characters for bytes that are not UTF-8."""

    @abstractmethod
    def to_json(self) -> bytes:
        """Return the content of a `tokenizer.json` that gives the same ids.

        An EOS token without a text is written as `EOS_NAMES[0]`.
        """

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without BOS and EOS."""
        return list(itertools.chain.from_iterable(self.encode_batch(list(_pieces(text)))))

    def pack(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the concatenated ids of all texts, int64 [tokens], and the length of each text.

        Each text begins with `bos_ids` and ends with `eos_id`.
        """
        pieces = [list(_pieces(text)) for text in texts]
        encoded = iter(self.encode_batch(list(itertools.chain.from_iterable(pieces))))
        documents = [list(itertools.islice(encoded, len(group))) for group in pieces]
        added = len(self.bos_ids) + 1
        lengths = np.array([sum(map(len, ids)) + added for ids in documents], dtype=np.int64)
        ended = (itertools.chain(self.bos_ids, *ids, (self.eos_id,)) for ids in documents)
        flat = itertools.chain.from_iterable(ended)
        return np.fromiter(flat, dtype=np.int64, count=int(lengths.sum())), lengths


class BytesTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8, and 256 ends a document."""

    kind = "bytes"
    name = "bytes"
    vocab_size = BYTES_EOS + 1
    eos_id = BYTES_EOS
    eos_token = ""
    digest = sha256_bytes(b"meshwright bytes tokenizer: UTF-8, eos 256")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the UTF-8 bytes of each text."""
        return [list(_utf8(text)) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids below 256; other ids are ignored."""
        return bytes(i for i in map(int, ids) if 0 <= i < BYTES_EOS).decode("utf-8", "replace")

    def to_json(self) -> bytes:
        """Return a byte-level BPE without merges as a `tokenizer.json`."""
        alphabet = {bytes([byte]): byte for byte in range(BYTES_EOS)}
        return byte_level_json(alphabet, EOS_NAMES[0], self.eos_id)

    def pack(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the concatenated bytes of all texts, each followed by 256, and the length of each.

        Creates no Python object per byte.
        """
        encoded = [_utf8(text) for text in texts]
        lengths = np.array([len(text) + 1 for text in encoded], dtype=np.int64)
        joined = np.frombuffer(b"\0".join([*encoded, b""]), dtype=np.uint8).astype(np.int64)
        joined[np.cumsum(lengths) - 1] = BYTES_EOS
        return joined, lengths


class JsonTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, run by the `tokenizers` library.

    `eos` names the end-of-document token; None reads it from the files beside the tokenizer
    (tokenizer_config.json, special_tokens_map.json) or looks for usual names. `bos` is whether
    texts begin with the BOS token, or the ids that they begin with; None follows the tokenizer's
    files. Raises DataError if the file cannot be used or no such token is found.
    """

    kind = "json"

    def __init__(
        self,
        file: Path,
        name: str,
        eos: str | None = None,
        bos: bool | Sequence[int] | None = None,
    ) -> None:
        from tokenizers import Tokenizer as Backend

        with reading(file):
            content = read_bytes(file)
        try:
            check_patterns(content)
            backend = Backend.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{file} is not a usable tokenizer.json: {error}") from error
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # quoted in a text, they are ordinary characters
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{file} has an empty vocabulary")
        self._backend = backend
        self._content = content
        self.file = file
        self.name = name
        self.vocab_size = max(vocabulary.values()) + 1
        added = sorted(backend.get_added_tokens_decoder().items())
        unknown = getattr(backend.model, "unk_token", None)
        special = [
            token.content for _, token in added if token.special and token.content != unknown
        ]
        self.eos_token = _find_eos(file, vocabulary, special, eos)
        self.eos_id = vocabulary[self.eos_token]
        self.own_bos_ids, named = _begins(file, backend, vocabulary)
        self.bos_ids = _asked_begin(file, self.own_bos_ids, named, bos)
        begin = f"\nbos {self.bos_ids}" if self.bos_ids else ""
        self.digest = sha256_bytes(content + f"\neos {self.eos_id}{begin}".encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text without BOS and EOS, encoded in parallel by the library."""
        if not texts:
            return []
        run = getattr(self._backend, "encode_batch_fast", self._backend.encode_batch)
        return [encoding.ids for encoding in run(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, with special tokens written out."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=False))

    def to_json(self) -> bytes:
        """Return the content of the tokenizer's file, unchanged."""
        return self._content


class TiktokenTokenizer(Tokenizer):
    """GPT-2's vocabulary through tiktoken; raises DataError if its data cannot be loaded."""

    kind = "tiktoken"
    name = "gpt2"
    eos_token = "<|endoftext|>"

    def __init__(self) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise DataError(_no_gpt2("tiktoken is not installed")) from error
        try:
            self._backend = tiktoken.get_encoding("r50k_base")
        except Exception as error:  # whatever its downloader raises
            reason = f"tiktoken has no copy of its data and cannot download it ({error!s:.120})"
            raise DataError(_no_gpt2(reason)) from error
        self.vocab_size = self._backend.n_vocab
        self.eos_id = self._backend.eot_token
        self.digest = self._digest()

    def _digest(self) -> str:
        digest = hashlib.sha256(self._backend._pat_str.encode())
        for token in self._backend.token_byte_values():  # sorted bytes
            digest.update(
                token.hex().encode() + b"=%d\n" % self._backend.encode_single_token(token)
            )
        digest.update(b"eos %d" % self.eos_id)
        return digest.hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, encoded in parallel threads."""
        return self._backend.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, with `<|endoftext|>` written out."""
        return self._backend.decode([int(i) for i in ids])

    def to_json(self) -> bytes:
        """Return the vocabulary as a `tokenizer.json`, with merges derived from the ranks."""
        tokens = self._backend.token_byte_values()
        ranks = {token: self._backend.encode_single_token(token) for token in tokens}
        return byte_level_json(ranks, self.eos_token, self.eos_id)


def load_tokenizer(
    name: str, eos: str | None = None, bos: bool | Sequence[int] | None = None
) -> Tokenizer:
    """Return the tokenizer "bytes" or "gpt2", of a `tokenizer.json` or its folder, or of a Hub id.

    `eos` names the end-of-document token if the files do not; `bos` is as in `JsonTokenizer`.
    Raises DataError if the tokenizer cannot be loaded.
    """
    if bos and name in ("bytes", "gpt2"):
        raise DataError(refusal(f"the tokenizer {name!r} has no BOS token", legal=["bos = false"]))
    if name == "bytes":
        return BytesTokenizer()
    if name == "gpt2":
        return TiktokenTokenizer()
    path = hub.folder_of(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise DataError(lacks_tokenizer_json(path))
    if not file.is_file():
        known = nearest(name, ("bytes", "gpt2"))
        hint = (
            'Give "bytes", "gpt2", the path of a tokenizer.json or of a folder that holds one, or '
            "a model's id on the Hub"
        )
        raise DataError(refusal(f"no tokenizer at {file}", legal=known, hint=hint))
    return JsonTokenizer(file, name, eos, bos)


def train_bpe(texts: Iterable[str], vocab_size: int, out: Path) -> Path:
    """Train a byte-level BPE whose end-of-document token is `<|endoftext|>`, and write it.

    `out` is a .json file, or a folder for a `tokenizer.json`. Returns the file. The vocabulary is
    smaller than `vocab_size` if no pairs are left to merge. Raises DataError if `vocab_size` is
    below 257 (the bytes and the end of document) or there is no text.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < BYTES_EOS + 1:
        raise DataError(
            f"vocab_size = {vocab_size}: a byte-level BPE needs at least {BYTES_EOS + 1} entries"
        )
    file = out if out.suffix == ".json" else out / "tokenizer.json"
    writable_folder(file.parent)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_NAMES[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    seen = itertools.count()
    counted = (text for text in texts if text and next(seen) >= 0)
    backend.train_from_iterator(counted, trainer)
    if next(seen) == 0:
        raise DataError("no text to train a tokenizer on")
    write_atomic(file, backend.to_str(pretty=True).encode())
    return file


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"a text with a lone surrogate at character {error.start}") from error


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of a text of at most `PIECE_CHARS` characters, cut at line ends if possible."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1
        end = end if end > start else start + PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def _find_eos(
    file: Path, vocabulary: dict[str, int], special: Sequence[str], asked: str | None
) -> str:
    """Return the end-of-document token: `asked`, else as the files beside state, else a usual name.

    `special` are the special tokens of the vocabulary, for the hint in the DataError if none is
    found.
    """
    if asked is not None and asked in vocabulary:
        return asked
    likely = _likely_ends([*(name for name in EOS_NAMES if name in vocabulary), *special])
    if asked is not None:
        rule = f"the end-of-document token {asked!r} is not in the vocabulary of {file}"
        legal = list(dict.fromkeys([*nearest(asked, likely), *likely]))[:3]
        hint = "" if legal else f"Leave data.eos out, and {_how_to_add(file)}"
        raise DataError(refusal(rule, legal=legal, hint=hint))
    stated = [
        _token_in(_config_beside(file.with_name(name)), "eos_token")
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    ]
    for name in (*stated, *EOS_NAMES):
        if name is not None and name in vocabulary:
            return name
    hint = "Name it with data.eos (data prepare: --eos), "
    hint += f"perhaps {either(likely[:3])}" if likely else f"or {_how_to_add(file)}"
    raise DataError(refusal(f"{file} does not say which token ends a document", hint=hint))


def _begins(
    file: Path, backend: Any, vocabulary: dict[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that transformers puts before every text, and the id of the stated BOS token.

    Either is empty if there is none.
    """
    config = _config_beside(file.with_name("tokenizer_config.json"))
    special = _config_beside(file.with_name("special_tokens_map.json"))
    name = _token_in(config, "bos_token") or _token_in(special, "bos_token")
    named = (vocabulary[name],) if name in vocabulary else ()
    # Of the file alone: transformers ignores add_bos_token of the config where there is one.
    encoding = backend.encode("a")
    begin = itertools.takewhile(bool, encoding.special_tokens_mask)
    return tuple(encoding.ids[: len(list(begin))]), named


def _asked_begin(
    file: Path, default: tuple[int, ...], named: tuple[int, ...], asked: bool | Sequence[int] | None
) -> tuple[int, ...]:
    if asked is None or (asked is True and default):
        return default
    if asked is True and not named:
        where = f"{file} does not say which token begins a text"
        raise DataError(f"{where}: add bos_token to its tokenizer_config.json, or data.bos = false")
    if asked is True:
        return named
    return tuple(asked) if asked else ()


def _likely_ends(tokens: Iterable[str]) -> list[str]:
    """Return the tokens whose names suggest the end of a document, most likely first."""
    names = {token: re.sub("[^a-z/]", "", token.lower()) for token in tokens}
    return [token for end in _ENDS for token, name in names.items() if re.fullmatch(end, name)]


def _how_to_add(file: Path) -> str:
    """Return a hint with the command that adds an end-of-document token to a tokenizer file."""
    add = f"t.add_special_tokens(['{EOS_NAMES[0]}'])"
    code = f"t = Tokenizer.from_file('{file}'); {add}; t.save('{file}')"
    return (
        "add one, as the file has no special token that could be it: "
        f'python -c "from tokenizers import Tokenizer; {code}"'
    )


def _token_in(config: dict[str, Any], key: str) -> str | None:
    """Return a config's special token that is a string or an object with `content`, else None."""
    token = config.get(key)
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _config_beside(config: Path) -> dict[str, Any]:
    """Return the JSON object of a config file; empty if the file does not exist."""
    if not config.is_file():
        return {}
    try:
        with reading(config):
            return dict(parse_json(read_text(config)))
    except (ValueError, TypeError) as error:
        raise DataError(f"{config} is not a JSON object: {error}") from error


def _no_gpt2(reason: str) -> str:
    return refusal(
        f'tokenizer = "gpt2": {reason}',
        hint="Install it with pip install 'meshwright[tiktoken]' and run once with a network; or "
        'give the path of a GPT-2 tokenizer.json; or use "bytes", which needs nothing',
    )
