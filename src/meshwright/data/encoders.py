"""Encoders of documents: for texts, all tokens are trained, for conversations the answers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat_template import ChatTemplate, Rendered, load_template
from meshwright.data.conversations import ASSISTANT, Conversation, Message, text_of, texts_in
from meshwright.data.corpora import Skip
from meshwright.data.tokenizers import Tokenizer, load_tokenizer
from meshwright.errors import DataError
from meshwright.files import sha256_bytes
from meshwright.parsing import parse_json
from meshwright.spec.training import DataFormat
from meshwright.units import counted

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


# Turns by which it is found out how a template ends the assistant's: an answer, a call of a tool.
_ASKED: Final = {"role": "user", "content": "a"}
_FUNCTION: Final = {"name": "f", "arguments": {"k": "v"}}
_CALL: Final = {"id": "call00000", "type": "function", "function": _FUNCTION}
_PROBES: Final = (
    (_ASKED, {"role": ASSISTANT, "content": "b"}),
    (_ASKED, {"role": ASSISTANT, "content": "", "tool_calls": [_CALL]}),
)
MOST_NOTES: Final = 12
NO_END: Final = (
    "the chat template ends answers without a special token: the model learns no end of a turn, "
    "and will not stop. Name a template that writes one with data.chat_template"
)


class Encoded(NamedTuple):
    """Documents one after the other: ids int64 `[tokens]` and the length of each document.

    `mask` bool `[tokens]` says which tokens are trained, None: all. `notes` are lines on what is
    not read or trained, and in how many documents.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    mask: NDArray[np.bool_] | None
    notes: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class TextEncoder:
    """Texts, each ended by the tokenizer's end of document."""

    tokenizer: Tokenizer
    template: None = None

    @property
    def digest(self) -> str:
        """The tokenizer's."""
        return self.tokenizer.digest

    def encode(self, documents: Sequence[str], skip: Skip | None = None) -> Encoded:
        """Return the ids of texts."""
        del skip
        return Encoded(*self.tokenizer.pack(documents), None)


@dataclass(frozen=True)
class ChatEncoder:
    """Conversations rendered by a template; the assistant's text is trained.

    This is what the template marks by `{% generation %}`, and else what `answer_spans` returns.
    Nothing is added to the template's text.
    """

    tokenizer: Tokenizer
    template: ChatTemplate

    @property
    def digest(self) -> str:
        """Identify the tokenizer and the template."""
        return sha256_bytes(f"chat {self.tokenizer.digest} {self.template.digest}".encode())

    @cached_property
    def _backend(self) -> Any:
        """Return the tokenizer that knows special tokens in a text, with exact offsets."""
        from tokenizers import Tokenizer as Backend

        # What comes after the model adds tokens, which templates do themselves, or moves offsets.
        content = parse_json(self.tokenizer.to_json()) | {"post_processor": None}
        content |= {"padding": None, "truncation": None}
        return Backend.from_str(json.dumps(content, ensure_ascii=False))

    @cached_property
    def _special_ids(self) -> list[int]:
        added = self._backend.get_added_tokens_decoder().items()
        return [number for number, token in added if token.special]

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self._backend.get_added_tokens_decoder().values()
        names = sorted((token.content for token in added if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def __getstate__(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer, "template": self.template}

    def encode(self, documents: Sequence[str], skip: Skip | None = None) -> Encoded:
        """Return the ids of conversations and which of them are trained.

        `skip` is called with a line on each that cannot be trained; without `skip`, it raises
        DataError.
        """
        ids: list[NDArray[np.int64]] = []
        masks: list[NDArray[np.bool_]] = []
        notes: Counter[str] = Counter()
        for document in documents:
            conversation = Conversation.from_text(document)
            try:
                document_ids, mask = self.one(conversation)
                notes.update(self._notes(conversation, document_ids, mask))
            except ValueError as error:
                problem = f"{conversation.where}: {error}"
                if skip is None:
                    hint = "data.on_error=skip passes over such conversations"
                    raise DataError(f"{problem}. {hint}") from error
                skip(problem)
                continue
            ids.append(document_ids)
            masks.append(mask)
        lengths = np.array([len(document_ids) for document_ids in ids], dtype=np.int64)
        none = np.empty(0, dtype=np.int64)
        mask = np.concatenate([none.astype(bool), *masks])
        return Encoded(np.concatenate([none, *ids]), lengths, mask, notes)

    def one(self, conversation: Conversation) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the ids of a conversation and its mask; raises ValueError with the reason.

        Reasons: the template refuses it, the trained text cannot be located exactly, or nothing is
        trained.
        """
        template_values = conversation.given
        self._refuse_quoted(conversation.messages, template_values)
        self.template.check(conversation.messages)
        answers = {
            number for number, m in enumerate(conversation.messages) if m["role"] == ASSISTANT
        }
        is_whole = answers == set(conversation.trained)
        has_turns = not (self.template.has_marks and is_whole)
        rendered = self.template.render(
            conversation.messages, **template_values, has_turns=has_turns
        )
        if self.template.has_marks:
            marked = rendered.marked
            if not is_whole:
                if not rendered.turns:
                    raise ValueError("it cannot be told which turn the template's marks belong to")
                marked = tuple(span for span in marked if span.message in conversation.trained)
            spans = [(span.start, span.stop) for span in marked]
        else:
            spans = list(answer_spans(self.template, conversation, rendered, self._special))
        encoding = self._backend.encode(rendered.text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int64)
        written = sum(1 for _ in self._special.finditer(rendered.text))
        if np.isin(ids, self._special_ids).sum() > written:
            raise ValueError("it has a special token in another spelling")
        mask = _covered(np.array(encoding.offsets).reshape(-1, 2), spans, rendered.text)
        if not mask[1:].any():  # the first token is nobody's target
            raise ValueError("the template marks no token of it as the assistant's")
        return ids, mask

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids that precede the assistant's answer; raises ValueError."""
        self._refuse_quoted(messages, {})
        text = self.template.render(messages, prompts=True).text
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def turn_ends(self) -> list[int]:
        """Return the ids of special tokens that end a turn of the assistant, in order."""
        ends = []
        for messages in _PROBES:
            try:
                ids, mask = self.one(Conversation("a probe", messages, (len(messages) - 1,)))
            except ValueError:
                continue
            if (end := self._end_of(ids, mask)) is not None and end not in ends:
                ends.append(end)
        return ends

    def _end_of(self, ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> int | None:
        """Return the special token at the end of the trained text; white space may follow it."""
        trained = ids[mask]
        special = np.flatnonzero(np.isin(trained, self._special_ids))
        if not len(special) or self.tokenizer.decode(trained[special[-1] + 1 :]).strip():
            return None
        return int(trained[special[-1]])

    def _notes(
        self, conversation: Conversation, ids: NDArray[np.int64], mask: NDArray[np.bool_]
    ) -> Iterator[str]:
        """Yield a note for each part of a conversation that is not read or not trained."""
        for name in conversation.unused:
            yield f"the field {name!r} is not used"
        for name in sorted(self.template.unread(conversation.messages)):
            yield f"the field {name!r} of messages is not read by the chat template"
        provided = {name for name in ("tools", "documents") if getattr(conversation, name)}
        for name in sorted(provided | conversation.options.keys()):
            if not self.template.reads(name):
                yield f"the field {name!r} is not read by the chat template"
        calls = [m for m in conversation.messages if m.get("tool_calls") and visible(m)]
        if calls and not all(visible(m) in self.tokenizer.decode(ids) for m in calls):
            yield "the content beside tool_calls is not written by the chat template"
        if self._end_of(ids, mask) is None:
            yield NO_END

    def _refuse_quoted(
        self, messages: Sequence[Message], template_values: Mapping[str, Any]
    ) -> None:
        """Refuse a text that quotes a special token, which would end a turn or begin one."""
        numbered = {f"message {number}": message for number, message in enumerate(messages, 1)}
        for name, value in {**numbered, **template_values}.items():
            for text in texts_in(value):
                if match := self._special.search(text):
                    raise ValueError(f"{name} quotes the special token {match[0]!r}")


Encoder = TextEncoder | ChatEncoder


def worded(notes: Mapping[str, int], among: str = "") -> list[str]:
    """Return notes as lines, each with its number of conversations `among` some, most first."""
    lines = [
        f"{line} ({f'{count} {among}' if among else counted(count, 'conversation')})"
        for line, count in Counter(notes).most_common()
    ]
    return [
        *lines[:MOST_NOTES],
        *([f"{len(lines) - MOST_NOTES} more"] if lines[MOST_NOTES:] else []),
    ]


@dataclass(frozen=True)
class Encoding:
    """The settings of an encoder: `data.tokenizer`, `eos`, `format`, `chat_template` and `bos`."""

    tokenizer: str
    eos: str | None
    form: DataFormat = "text"
    template: str | None = None
    bos: bool | None = None

    def load(self) -> Encoder:
        """Return the encoder; raises DataError if it is not available."""
        return encoder_of(
            load_tokenizer(self.tokenizer, self.eos, self.bos), self.form, self.template
        )


def encoder_of(tokenizer: Tokenizer, form: DataFormat, template: str | None = None) -> Encoder:
    """Return the encoder of a `data.format` with a loaded tokenizer."""
    if form == "text":
        return TextEncoder(tokenizer)
    if tokenizer.file is None:
        raise DataError(
            f"data.format = 'chat' needs a tokenizer.json with a chat template; the tokenizer "
            f"{tokenizer.name!r} has none"
        )
    return ChatEncoder(tokenizer, load_template(tokenizer.file, template))


def _covered(
    offsets: NDArray[np.int64], spans: Sequence[tuple[int, int]], text: str
) -> NDArray[np.bool_]:
    """Return which tokens lie in spans of characters; ValueError for one that is partly inside."""
    mask = np.zeros(len(offsets), dtype=bool)
    starts, stops = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    for first, last in spans:
        touches, inside = (starts < last) & (stops > first), (starts >= first) & (stops <= last)
        if (touches & ~inside).any():
            index = int(np.argmax(touches & ~inside))
            token = text[offsets[index, 0] : offsets[index, 1]]
            raise ValueError(
                f"the token {token!r} is in part the assistant's and in part the template's, so "
                "what is trained cannot be located exactly"
            )
        mask |= inside
    return mask
