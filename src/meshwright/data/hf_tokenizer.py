"""Writes a tokenizer as the files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.boundaries import ends_of, stated_ends, with_begin
from meshwright.data.tokenizers import Tokenizer
from meshwright.errors import DataError
from meshwright.files import read_bytes, reading, write_atomic
from meshwright.parsing import parse_json
from meshwright.spec.training import DataFormat

TOKENIZER, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
SPECIAL = "special_tokens_map.json"
# What transformers reads beside a tokenizer.json, and what says which ids end a text.
TEMPLATE = "chat_template.jinja"
COMPANIONS = (CONFIG, SPECIAL, TEMPLATE, GENERATION)


@dataclass(frozen=True)
class HFTokenizer:
    """The files of a tokenizer by name, and the BOS and EOS ids to state in `config.json`.

    `eos_token_id` is one id or several, of which the first is the tokenizer's EOS token. None means
    that there is no such token.
    """

    files: Mapping[str, bytes]
    bos_token_id: int | None
    eos_token_id: int | list[int] | None


def hf_tokenizer(
    tokenizer: Tokenizer | None, context: int, form: DataFormat = "text"
) -> HFTokenizer:
    """Return files from which `AutoTokenizer` gives the same ids, and `generation_config.json`.

    Files beside a `tokenizer.json` are included. The EOS token is the one that ended documents in
    training or, with `form` "chat", turns; `generation_config.json` names all ids of `ends_of`.
    Texts begin as in training. If no file names a BOS token, it is the end-of-document token, as in
    GPT-2, since in training this precedes a document. `context` is the longest text in tokens. If
    `tokenizer` is None, the only file is a generation config without ids. Raises DataError for a
    file beside the tokenizer that is not a JSON object.
    """
    if tokenizer is None:
        return HFTokenizer({GENERATION: _json({})}, None, None)
    content = tokenizer.to_json()
    id_of = _vocabulary(content)
    # The byte tokenizer ends documents with an id that has no name of its own.
    eos = tokenizer.eos_token or next(t for t, i in id_of.items() if i == tokenizer.eos_id)
    companions = {} if tokenizer.file is None else _read(tokenizer.file.parent)
    config = _object(CONFIG, companions) or _plain_config(content, context)
    config.setdefault("bos_token", _name(_object(SPECIAL, companions).get("bos_token", eos)))
    ends = ends_of(tokenizer, form)
    first = tokenizer.eos_id if form == "text" else ends[0]
    name_of = {number: name for name, number in id_of.items()}
    if _name(config.get("eos_token")) != name_of[first]:
        config["eos_token"] = name_of[first]
    if config.get("tokenizer_class") == "TokenizersBackend":  # transformers 4 does not know it
        config["tokenizer_class"] = "PreTrainedTokenizerFast"

    bos_id = id_of.get(_name(config["bos_token"]) or "")
    if tokenizer.file is not None and tokenizer.bos_ids != tokenizer.own_bos_ids:
        content = with_begin(content, tokenizer.bos_ids)
        config["add_bos_token"] = bool(tokenizer.bos_ids)
    written = ends if len(ends) > 1 else ends[0]
    generation = _object(GENERATION, companions) | {"bos_token_id": bos_id, "eos_token_id": written}
    generated = {TOKENIZER: content, CONFIG: _json(config), GENERATION: _json(generation)}
    return HFTokenizer({**companions, **generated}, bos_id, written)


def copy_tokenizer(file: Path, folder: Path, template: Path | None = None) -> None:
    """Copy a `tokenizer.json` and its companion files into a folder.

    `template` is a file to write in place of the tokenizer's own chat template.
    """
    with reading(file):
        contents = {TOKENIZER: read_bytes(file), **_read(file.parent)}
    ends = stated_ends(file.parent)
    if ends and GENERATION not in contents:  # stated by config.json, which is not a tokenizer's
        contents[GENERATION] = _json({"eos_token_id": ends})
    if template is not None:
        with reading(template):
            contents[TEMPLATE] = read_bytes(template)
    for name, content in contents.items():
        write_atomic(folder / name, content)


def _read(folder: Path) -> dict[str, bytes]:
    paths = [folder / name for name in COMPANIONS if (folder / name).is_file()]
    contents = {}
    for path in paths:
        with reading(path):
            contents[path.name] = read_bytes(path)
    return contents


def _plain_config(content: bytes, context: int) -> dict[str, Any]:
    """Return a tokenizer config with which transformers uses a tokenizer.json unchanged."""
    cut = parse_json(content).get("pre_tokenizer") or {}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        # transformers 4 changes the file's own setting where this is missing.
        "add_prefix_space": bool(cut.get("add_prefix_space", False)),
    }


def _vocabulary(content: bytes) -> dict[str, int]:
    from tokenizers import Tokenizer as Backend

    return dict(Backend.from_str(content.decode()).get_vocab(with_added_tokens=True))


def _object(name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        return dict(parse_json(files[name]))
    except (ValueError, TypeError) as error:
        raise DataError(f"{name} beside the tokenizer.json is not a JSON object") from error


def _name(token: object) -> str | None:
    """Return the text of a special token, given as a string or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
