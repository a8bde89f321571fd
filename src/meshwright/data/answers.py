"""Where the assistant's answers are in a rendered conversation whose template does not mark them.

A template renders a conversation in a loop over its messages, so that each message has a range of
the text of its own (`ChatTemplate.render`). Of an answer's range, the prompt that precedes it in
generation is the template's, as is what follows the token that ends the turn. This holds for
templates that write a turn differently when others follow, as those that drop earlier reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from meshwright.data.chat_template import ChatTemplate, Rendered
from meshwright.data.conversations import Conversation
from meshwright.data.messages import ASSISTANT, text_of

_THOUGHT: Final = "<think>"
_CONTENT: Final = "content of 1 answer"
_MARK: Final = "Mark answers in the template: {% generation %}...{% endgeneration %}"


def answer_spans(
    template: ChatTemplate,
    conversation: Conversation,
    rendered: Rendered,
    special: re.Pattern[str],
) -> Iterator[tuple[int, int]]:
    """Yield the ranges of characters of the answers that are trained.

    `special` matches special tokens. Raises ValueError where a range cannot be told exactly.
    """
    if not rendered.turns:
        raise ValueError(
            f"the chat template does not write one message after the other, so what is trained "
            f"cannot be located exactly. {_MARK}"
        )
    for number in conversation.trained:
        ranges = [(start, stop) for start, stop, message in rendered.turns if message == number]
        if not ranges:
            raise ValueError(f"the chat template writes nothing of turn {number + 1}")
        (start, stop), *_ = ranges
        start += _header(template, conversation, number, rendered.text[start:stop], special)
        ranges[0] = (start, stop)
        answer_text = "".join(rendered.text[first:last] for first, last in ranges)
        _check_content(conversation, number, answer_text)
        first, last = ranges[-1]
        ranges[-1] = (first, first + _end(rendered.text[first:last], special))
        yield from (span for span in ranges if span[1] > span[0])


def _header(
    template: ChatTemplate,
    conversation: Conversation,
    number: int,
    written: str,
    special: re.Pattern[str],
) -> int:
    """Return how many characters of an answer's range are the prompt for it."""
    before = conversation.messages[:number]
    with_prompt = template.render(before, **conversation.given, prompts=True).text
    plain = template.render(before, **conversation.given).text
    shared = next(
        (
            n
            for n in range(min(len(with_prompt), len(written)), 0, -1)
            if with_prompt.endswith(written[:n])
        ),
        0,
    )
    prompt = with_prompt[len(plain) :] if with_prompt.startswith(plain) else ""
    if with_prompt == plain:
        return _without_prompt(conversation, number, written, shared, special)
    if shared and shared >= len(prompt):
        return shared
    # The prompt may have more than an earlier answer begins with: the beginning of a thought.
    begin = _before_content(template, conversation, number)
    if not (prompt.startswith(begin) and written.startswith(begin)):
        begin = prompt.partition(_THOUGHT)[0]  # both have a thought, and they differ from there on
    if not begin or not written.startswith(begin):
        raise ValueError(
            f"the chat template writes turn {number + 1} differently with the prompt for it, so "
            f"what is trained cannot be located exactly. {_MARK}"
        )
    return len(begin)


def _before_content(template: ChatTemplate, conversation: Conversation, number: int) -> str:
    """Return the text that the template puts before the content of an answer without calls."""
    messages = list(conversation.messages)
    messages[number] = {"role": ASSISTANT, "content": _CONTENT}
    rendered = template.render(messages, **conversation.given, has_turns=True)
    texts = [
        rendered.text[start:stop] for start, stop, message in rendered.turns if message == number
    ]
    return "".join(texts).partition(_CONTENT)[0]


def _without_prompt(
    conversation: Conversation, number: int, written: str, shared: int, special: re.Pattern[str]
) -> int:
    """Return how much of an answer's range is not the answer's, for a template without a prompt."""
    if any(match.end() == shared for match in special.finditer(written)):
        return shared
    content = text_of(conversation.messages[number]).strip()
    if visible(conversation.messages[number]) not in written:
        raise ValueError(f"the chat template does not write the content of turn {number + 1}")
    if content and not written.lstrip().startswith(content):
        raise ValueError(
            "the chat template has no prompt for an answer (add_generation_prompt) and writes "
            f"{written[:20]!r} before it, which is not the assistant's. {_MARK}"
        )
    return 0


def _check_content(conversation: Conversation, number: int, answer_text: str) -> None:
    """Refuse a template that drops the text of an answer that has nothing else."""
    message = conversation.messages[number]
    if not message.get("tool_calls") and visible(message) not in answer_text:
        raise ValueError(f"the chat template does not write the content of turn {number + 1}")


def visible(message: Mapping[str, Any]) -> str:
    """Return an answer's text after its reasoning, which templates drop or write elsewhere."""
    return text_of(message).rpartition("</think>")[2].strip()


def _end(written: str, special: re.Pattern[str]) -> int:
    """Return where a turn ends: after its last special token, if only white space follows that."""
    ends = [match.end() for match in special.finditer(written)]
    return ends[-1] if ends and not written[ends[-1] :].strip() else len(written)
