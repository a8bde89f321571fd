"""Which tokens begin and end a text: one rule for training, evaluation, generation and export.

A text begins with the ids that its tokenizer puts before every text, such as BOS (`data.bos`
changes this). In training, a document ends with the tokenizer's end-of-document token, and a
conversation as its chat template ends it. Generation stops at each of these, and at those that the
model's own files state.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from meshwright.data.chat_template import json_object
from meshwright.data.encoders import ChatEncoder, encoder_of
from meshwright.data.tokenizers import Tokenizer
from meshwright.parsing import parse_json
from meshwright.spec.training import DataFormat

GENERATION: Final = "generation_config.json"
MODEL: Final = "config.json"


def ends_of(tokenizer: Tokenizer, form: DataFormat = "text") -> list[int]:
    """Return the token ids at which generation stops, without duplicates.

    For a model trained on texts: the ids that the model's own files state (see `stated_ends`) and,
    first unless it is among them, the tokenizer's end-of-document id. With `form` "chat": the ids
    that end the assistant's turns in the chat template come first, then the same ones.
    """
    stated = stated_ends(None if tokenizer.file is None else tokenizer.file.parent)
    if form == "text":
        return stated if tokenizer.eos_id in stated else [tokenizer.eos_id, *stated]
    encoder = encoder_of(tokenizer, form)
    assert isinstance(encoder, ChatEncoder)
    return list(dict.fromkeys([*encoder.turn_ends(), tokenizer.eos_id, *stated]))


def stated_ends(folder: Path | None) -> list[int]:
    """Return `eos_token_id` of a folder's generation_config.json, else config.json, as a list.

    The list is empty if neither file states one, or if `folder` is None. Raises DataError for a
    file that is not a JSON object.
    """
    for name in (GENERATION, MODEL) if folder is not None else ():
        assert folder is not None
        ends = json_object(folder / name).get("eos_token_id")
        ids = [end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int]
        if ids:
            return ids
    return []


def with_begin(content: bytes, begin: Sequence[int]) -> bytes:
    """Return a `tokenizer.json` changed to put exactly the ids `begin` before every text.

    This replaces the file's post-processor; an empty `begin` removes it.
    """
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(content.decode())
    names = [str(backend.id_to_token(number)) for number in begin]
    processor: dict[str, Any] | None = None
    if names:
        pieces = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
        text = {"Sequence": {"id": "A", "type_id": 0}}
        second = [{"Sequence": {"id": "B", "type_id": 1}}]
        tokens = {
            name: {"id": name, "ids": [number], "tokens": [name]}
            for name, number in zip(names, begin, strict=True)
        }
        processor = {
            "type": "TemplateProcessing",
            "single": [*pieces, text],
            "pair": [*pieces, text, *second],
            "special_tokens": tokens,
        }
    body = parse_json(content) | {"post_processor": processor}
    return json.dumps(body, ensure_ascii=False, indent=2).encode()
