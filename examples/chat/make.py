"""Writes the conversations of this folder and a tokenizer of bytes with a chat template.

    python examples/chat/make.py

The conversations are made of a few facts about colours, opposites and sums, so they are nobody's.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
COLOURS = {
    "snow": "white", "grass": "green", "the sky": "blue", "a lemon": "yellow", "blood": "red",
    "coal": "black", "a carrot": "orange", "chocolate": "brown", "an elephant": "grey",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "up": "down", "dark": "light", "old": "new",
    "wet": "dry", "loud": "quiet", "early": "late", "full": "empty", "near": "far",
}  # fmt: skip


def turns(rng: random.Random) -> tuple[str, str]:
    """Return a question and its answer."""
    kind = rng.randrange(3)
    if kind == 0:
        thing, colour = rng.choice(list(COLOURS.items()))
        asked = rng.choice((f"What colour is {thing}?", f"Tell me the colour of {thing}."))
        return asked, f"It is {colour}, my friend!"
    if kind == 1:
        one, other = rng.choice([pair for p in OPPOSITES.items() for pair in (p, p[::-1])])
        asked = rng.choice((f"What is the opposite of {one}?", f"Opposite of {one}?"))
        return asked, f"It is {other}, my friend!"
    a, b = rng.randrange(6), rng.randrange(5)
    return f"What is {a} plus {b}?", f"It is {a + b}, my friend!"


def conversation(rng: random.Random) -> dict[str, object]:
    """Return a row of one to three questions with their answers."""
    messages = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        asked, answer = turns(rng)
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose entries are the 256 bytes, a chat's marks and the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in TOKENS])
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(backend.to_str(), "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def main() -> None:
    """Write both."""
    rng = random.Random(0)
    rows = [json.dumps(conversation(rng)) for _ in range(400)]
    (HERE / "conversations.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
    write_tokenizer(HERE / "tokenizer")


if __name__ == "__main__":
    main()
