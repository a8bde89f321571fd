"""Encoders of documents to token ids and loss masks.

In texts all tokens are trained on, in conversations only the assistant's answers.
"""

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
    """Yield the ranges of characters of the answers to train on, including the end of each turn.

    `special` matches special tokens. Raises ValueError if a range cannot be determined exactly.
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
    """Return how many characters at the start of a rendered answer belong to its prompt.

    `written` is the rendered message `number`; the header is what the template writes before the
    assistant's own text, for example its role.
    """
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
    """Return the text that the template writes before the content of a plain answer."""
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
    """Return the length of an answer's header, for a template that ignores add_generation_prompt.

    `shared` is the length of its overlap with the end of the text before. Raises ValueError if text
    that the template itself writes cannot be distinguished from the answer.
    """
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
    """Raise ValueError if an answer without tool calls is missing from its rendered text."""
    message = conversation.messages[number]
    if not message.get("tool_calls") and visible(message) not in answer_text:
        raise ValueError(f"the chat template does not write the content of turn {number + 1}")


def visible(message: Mapping[str, Any]) -> str:
    """Return an answer's text after its reasoning, which templates may drop or write elsewhere."""
    return text_of(message).rpartition("</think>")[2].strip()


def _end(written: str, special: re.Pattern[str]) -> int:
    """Return where a turn ends in its text: after a final special token, or else at the end.

    White space after the special token does not belong to the turn.
    """
    ends = [match.end() for match in special.finditer(written)]
    return ends[-1] if ends and not written[ends[-1] :].strip() else len(written)


# Probes of how a template ends the assistant's turns: an answer, and a tool call.
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
    """Encoded documents, concatenated: ids, int64 [tokens], and the length of each document.

    `mask`, bool [tokens], says which tokens are trained on; None means all. `notes` maps lines on
    content that is not read or not trained on to the number of documents with it.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    mask: NDArray[np.bool_] | None
    notes: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class TextEncoder:
    """Encodes texts, each followed by the tokenizer's end-of-document token."""

    tokenizer: Tokenizer
    template: None = None

    @property
    def digest(self) -> str:
        """The digest of the tokenizer."""
        return self.tokenizer.digest

    def encode(self, documents: Sequence[str], skip: Skip | None = None) -> Encoded:
        """Return the concatenated ids of texts; all tokens are trained on."""
        del skip
        return Encoded(*self.tokenizer.pack(documents), None)


@dataclass(frozen=True)
class ChatEncoder:
    """Encodes conversations by a chat template; only the assistant's text is trained on.

    That text is what the template marks by `{% generation %}` or, without such marks, what
    `answer_spans` locates. No token is added to those of the rendered text.
    """

    tokenizer: Tokenizer
    template: ChatTemplate

    @property
    def digest(self) -> str:
        """A digest of the tokenizer and the template, which determine the encoding."""
        return sha256_bytes(f"chat {self.tokenizer.digest} {self.template.digest}".encode())

    @cached_property
    def _backend(self) -> Any:
        """The `tokenizers` library's tokenizer, without steps that add tokens or shift offsets."""
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
        """Return the concatenated ids and loss mask of conversations in JSON form.

        `skip` is called with a line for each conversation that cannot be trained on; without
        `skip`, the first of these raises DataError.
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
        """Return the ids of one conversation, int64 [tokens], and its loss mask, bool [tokens].

        Raises ValueError if the template rejects it, the text to train on cannot be located
        exactly, or there is none.
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
        if not mask[1:].any():  # the first token is not a target
            raise ValueError("the template marks no token of it as the assistant's")
        return ids, mask

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of messages followed by the template's prompt for the assistant's answer.

        Raises ValueError if the template rejects the messages or one of them quotes a special
        token.
        """
        self._refuse_quoted(messages, {})
        text = self.template.render(messages, prompts=True).text
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def turn_ends(self) -> list[int]:
        """Return the special tokens that end an assistant's turn, found by rendering probes."""
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
        """Return the special token that ends the trained text, or None if other text follows it."""
        trained = ids[mask]
        special = np.flatnonzero(np.isin(trained, self._special_ids))
        if not len(special) or self.tokenizer.decode(trained[special[-1] + 1 :]).strip():
            return None
        return int(trained[special[-1]])

    def _notes(
        self, conversation: Conversation, ids: NDArray[np.int64], mask: NDArray[np.bool_]
    ) -> Iterator[str]:
        """Yield a line for each part of a conversation that is not read or not trained on."""
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
        """Raise ValueError if a text contains a special token, which would end or begin a turn."""
        numbered = {f"message {number}": message for number, message in enumerate(messages, 1)}
        for name, value in {**numbered, **template_values}.items():
            for text in texts_in(value):
                if match := self._special.search(text):
                    raise ValueError(f"{name} quotes the special token {match[0]!r}")


Encoder = TextEncoder | ChatEncoder


def worded(notes: Mapping[str, int], among: str = "") -> list[str]:
    """Return notes as lines with their numbers of conversations, most frequent first.

    `notes` maps each note to a count. `among` describes the conversations counted. At most
    `MOST_NOTES` are written out.
    """
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
        """Return the encoder; raises DataError if its tokenizer or template is not available."""
        return encoder_of(
            load_tokenizer(self.tokenizer, self.eos, self.bos), self.form, self.template
        )


def encoder_of(tokenizer: Tokenizer, form: DataFormat, template: str | None = None) -> Encoder:
    """Return the encoder for a `data.format`; `template` is the path of a chat template, if any.

    Without a path, "chat" uses the template beside the tokenizer; raises DataError if there is
    none.
    """
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
    """Return which tokens lie inside the given character spans, bool [tokens].

    `offsets`, int64 [tokens, 2], has the start and end character of each token. Raises ValueError
    for a token that is only partly inside a span.
    """
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
