"""A vocabulary of byte strings as a byte-level BPE `tokenizer.json`, with the same ids."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise


def byte_level_json(ranks: Mapping[bytes, int], eos: str, eos_id: int) -> bytes:
    """Return the `tokenizer.json` of a vocabulary whose ids are also its merge ranks.

    This is the form of tiktoken's vocabularies; the 256 single bytes alone merge nothing. Text is
    split as in GPT-2. `eos` is the special token, and `eos_id` must be the id after the last.
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
    """Return the printable character that stands for each of the 256 bytes, as in GPT-2's files."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pair that forms each token of more than one byte, in the order of the ranks.

    It is what merges of lower rank make of the token's bytes; ranks of a trained BPE always leave
    two parts.
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
