"""Random conversations through published chat templates, beside transformers' own rendering.

    python -m benchmarks.conversations [--templates FOLDER] [--count 3000] [--seed 0]

Each conversation is written as a row in one of the ways that people publish, as jsonl and as
Parquet, and read back as `data prepare` does. The text and the mask of each must be those of
transformers' `apply_chat_template` for the plain messages, or the row must be refused. Without
`--templates`, the folder of the installed trl is taken. Masks are compared where the template
marks answers, or where a copy of it does (`NAME_training.jinja`) that writes the same text: some
copies also mark the prompt for an answer, and the white space after its end.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import logging
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.chat_template import ChatTemplate
from meshwright.data.conversations import ChatRows, Conversation
from meshwright.data.encoders import ChatEncoder
from meshwright.data.formats import read_whole
from meshwright.data.tokenizers import load_tokenizer

NAMES = (
    *("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "llama3_1", "phi3", "phi3_5", "gptoss"),
    *("deepseekv3", "glm4moe", "gemma", "gemma3", "cohere", "qwen3_5_think"),
)
TOKENIZER = Path(__file__).parent.parent / "examples" / "chat" / "tokenizer" / "tokenizer.json"
SPECIAL = re.compile(
    r"<\|[a-zA-Z_]+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|<bos>|</?s>"
)
WORDS = [
    "snow",
    "is",
    "white",
    ";",
    "the",
    "3",
    "tides",
    "—",
    "come",
    "{back}",
    '"at"',
    "noon\n",
    "and",
    "<go>",
    "äß",
    "潮",
    "🌊",
    "again",
]
TOOLS = {
    "get_weather": {"city": "string", "days": "integer"},
    "get_time": {"zone": "string"},
    "search": {"query": "string", "limit": "integer"},
}


@dataclass
class Counts:
    """How many renderings were equal, refused here, refused by both, and wrong, with examples."""

    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def words(draw: random.Random, most: int = 8) -> str:
    """Return a text that may begin or end with white space."""
    ends = draw.choice(["", "", "", " ", "\n"]), draw.choice(["", "", "", " ", "\n\n"])
    return ends[0] + " ".join(draw.choices(WORDS, k=draw.randint(1, most))) + ends[1]


def conversation(draw: random.Random) -> dict[str, Any]:
    """Return plain messages and tools, as transformers' documentation has them."""
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.4:
        messages.append({"role": "system", "content": words(draw)})
    tools = draw.sample(sorted(TOOLS), draw.randint(1, 2)) if draw.random() < 0.35 else []
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": words(draw)})
        if tools and draw.random() < 0.5:
            name = draw.choice(tools)
            given = {
                key: words(draw, 2).strip() if kind == "string" else draw.randint(0, 99)
                for key, kind in TOOLS[name].items()
            }
            call = {"id": "call00000", "type": "function", "function": {"name": name}}
            call["function"]["arguments"] = given
            called = {"role": "assistant", "tool_calls": [call]}
            if draw.random() < 0.5:
                called["content"] = words(draw)
            answer = {"role": "tool", "name": name, "tool_call_id": "call00000"}
            messages += [called, answer | {"content": words(draw)}]
        answer = {"role": "assistant", "content": words(draw)}
        if draw.random() < 0.3:
            answer["reasoning_content"] = words(draw)
        messages.append(answer)
    return {"messages": messages, "tools": [_tool(name) for name in tools] or None}


def _tool(name: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in TOOLS[name].items()}
    schema = {"type": "object", "properties": properties, "required": sorted(properties)}
    function = {"name": name, "description": f"What {name} says", "parameters": schema}
    return {"type": "function", "function": function}


def written(plain: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return a row that means the same, in one of the ways that people publish."""
    messages = copy.deepcopy(plain["messages"])
    row: dict[str, Any] = {"id": draw.randint(0, 9)}
    if plain["tools"]:
        row["tools"] = json.dumps(plain["tools"]) if draw.random() < 0.3 else plain["tools"]
    texts_only = all(message.keys() == {"role", "content"} for message in messages)
    if texts_only and draw.random() < 0.3:
        names = {"user": "human", "assistant": "gpt", "system": "system"}
        turns = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
        return row | {"conversations": turns}
    if texts_only and messages[0]["role"] == "system" and draw.random() < 0.5:
        return row | {"messages": messages[1:], "system": messages[0]["content"]}
    reasoning = draw.choice(["reasoning_content", "reasoning", "thinking"])
    as_text = draw.random() < 0.5
    for message in messages:
        if "reasoning_content" in message:
            message[reasoning] = message.pop("reasoning_content")
        for call in message.get("tool_calls", ()):
            if as_text:
                function = call["function"]
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        if "tool_calls" in message and "content" not in message and draw.random() < 0.5:
            message["content"] = None
    return row | {"messages": messages}


def read_back(rows: Sequence[dict[str, Any]], folder: Path, form: str) -> list[Any]:
    """Write rows as a file of a format and return what reading it gives for each."""
    if form == "jsonl":
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return list(read_whole(path, ChatRows(), None))
    import pyarrow as pa
    from pyarrow.parquet import write_table

    found: list[Any] = [None] * len(rows)
    # A column has one type: rows with tools or arguments as texts go into a file of their own.
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        calls = re.findall(r'"arguments": (.)', json.dumps(row))
        kind = f"{type(row.get('tools')).__name__} {calls[:1]}"
        groups.setdefault(kind, []).append(number)
    for kind, numbers in enumerate(groups.values()):
        path = folder / f"rows{kind}.parquet"
        write_table(
            pa.Table.from_pylist([_plain_row(rows[n], rows, numbers) for n in numbers]), path
        )
        for number, piece in zip(numbers, read_whole(path, ChatRows(), None), strict=True):
            found[number] = piece
    return found


def _plain_row(
    row: dict[str, Any], rows: Sequence[dict[str, Any]], numbers: Sequence[int]
) -> dict[str, Any]:
    """Return a row with the fields of all rows of its file, which `from_pylist` wants."""
    return {key: row.get(key) for number in numbers for key in rows[number]}


def templates_of(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield the name and source of templates, and the source of a copy with marks, if any."""
    for name in names:
        path, marked = folder / f"{name}.jinja", folder / f"{name}_training.jinja"
        if path.is_file():
            yield (
                name,
                path.read_text("utf-8"),
                marked.read_text("utf-8") if marked.is_file() else None,
            )


def tokenizer_with(sources: Sequence[str], folder: Path) -> Any:
    """Return a tokenizer of bytes with the special tokens of templates, and transformers' of it."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_file(str(TOKENIZER))
    found = sorted({token for source in sources for token in SPECIAL.findall(source)})
    backend.add_special_tokens([AddedToken(token, special=True) for token in found])
    backend.save(str(folder / "tokenizer.json"))
    ends = {"eos_token": "<|endoftext|>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **ends)
    return load_tokenizer(str(folder)), theirs


def compare(
    templates: Sequence[tuple[str, str, str | None]], count: int, seed: int, formats: Sequence[str]
) -> dict[str, Counts]:
    """Return what came out of each template."""
    draw = random.Random(seed)
    plain = [conversation(draw) for _ in range(count)]
    rows = [written(one, draw) for one in plain]
    outcome: dict[str, Counts] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pieces = {form: read_back(rows, folder, form) for form in formats}
        sources = [source for _, source, _ in templates]
        ours, theirs = tokenizer_with([*sources, "<|endoftext|><s>"], folder)
        tokens = {"eos_token": "<|endoftext|>", "bos_token": "<s>"}
        for name, source, marked in templates:
            counts = outcome[name] = Counts()
            encoder = ChatEncoder(ours, ChatTemplate(source, tokens, name))
            for number, (one, row) in enumerate(zip(plain, rows, strict=True)):
                wanted = _theirs(theirs, one, source, marked, encoder)
                for form in formats:
                    kind, why = _judged(encoder, pieces[form][number], wanted)
                    counts.kinds[kind] += 1
                    if kind == "refused":
                        counts.reasons[re.sub(r"\d+", "N", why)[:110]] += 1
                    if kind == "WRONG":
                        counts.wrong.append(f"{form}: {json.dumps(row)}\n{why}")
    return outcome


def _theirs(
    tokenizer: Any, one: dict[str, Any], source: str, marked: str | None, encoder: ChatEncoder
) -> tuple[list[int], list[int] | None] | None:
    """Return transformers' ids and mask; None if it refuses, and no mask where it has none."""
    messages = one["messages"]
    if encoder.template.arguments == "text":
        messages = json.loads(json.dumps(messages))
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(
                    call["function"]["arguments"], ensure_ascii=False
                )
    try:
        plain = tokenizer.apply_chat_template(
            messages, tools=one["tools"], chat_template=source, return_dict=True
        )["input_ids"]
    except Exception:
        return None
    for with_marks in (source, marked):
        if with_marks is None or "generation" not in re.findall(r"{%-?\s*(\w+)", with_marks):
            continue
        try:
            found = tokenizer.apply_chat_template(
                messages,
                tools=one["tools"],
                chat_template=with_marks,
                return_assistant_tokens_mask=True,
                return_dict=True,
            )
        except Exception:
            continue
        if found["input_ids"] == plain:
            return plain, found["assistant_masks"]
    return plain, None


def _judged(encoder: ChatEncoder, piece: Any, wanted: Any) -> tuple[str, str]:
    if not isinstance(piece, str):
        return ("refused", piece.reason) if wanted is not None else ("refused by both", "")
    try:
        ids, mask = encoder.one(Conversation.from_text(piece))
    except ValueError as error:
        return ("refused", str(error)) if wanted is not None else ("refused by both", "")
    if wanted is None:
        return "accepted here alone", ""
    if ids.tolist() != wanted[0]:
        texts = [encoder.tokenizer.decode(some) for some in (ids, wanted[0])]
        return "WRONG", f"  here:   {texts[0]!r}\n  theirs: {texts[1]!r}"
    if wanted[1] is None:
        return "equal texts", ""
    theirs = np.array(wanted[1], dtype=bool)
    if np.array_equal(mask, theirs):
        return "equal texts and masks", ""
    # What their marks have beside: the prompt for an answer, white space, tokens after its end.
    prompt = encoder.template.render([{"role": "user", "content": ""}], prompts=True).text
    more = [encoder.tokenizer.decode([one]).strip() for one in ids[theirs & ~mask].tolist()]
    if not (mask & ~theirs).any() and all(
        text in prompt or text == "<|endoftext|>" for text in more
    ):
        return "equal texts, masks but for the prompt", ""
    texts = [encoder.tokenizer.decode(ids[some]) for some in (mask, theirs)]
    return "WRONG", f"  here:   {texts[0]!r}\n  theirs: {texts[1]!r}"


def main() -> int:
    """Print a line for each template; exit 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--templates", type=Path, help="a folder of .jinja files")
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = args.templates
    if folder is None:
        found = importlib.util.find_spec("trl")
        if found is None or found.origin is None:
            print("no templates: give --templates, or install trl, which has them")
            return 2
        folder = Path(found.origin).parent / "chat_templates"
    logging.disable(logging.ERROR)
    chosen = list(templates_of(folder, args.names))
    outcome = compare(chosen, args.count, args.seed, ("jsonl", "parquet"))
    for name, counts in outcome.items():
        kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(counts.kinds.items()))
        print(f"{name}: {kinds}")
        for why, n in counts.reasons.most_common(5):
            print(f"    refused {n}: {why}")
        for example in counts.wrong[:2]:
            print(example)
    return int(any(counts.wrong for counts in outcome.values()))


if __name__ == "__main__":
    sys.exit(main())
