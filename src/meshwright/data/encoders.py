"""Encoders of documents: for texts, all tokens are trained, for conversations the answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat_template import ChatTemplate, load_template
from meshwright.data.conversations import ASSISTANT, Conversation, Message
from meshwright.data.corpora import Skip
from meshwright.data.tokenizers import Tokenizer, load_tokenizer
from meshwright.errors import DataError
from meshwright.files import sha256_bytes
from meshwright.parsing import parse_json
from meshwright.spec.training import DataFormat

# Two turns, by which it is found out how a template ends the assistant's.
_PROBE: Final = (
    {"role": "user", "content": "a"},
    {"role": ASSISTANT, "content": "b"},
)


class Encoded(NamedTuple):
    """Documents one after the other: ids int64 `[tokens]` and the length of each document.

    `mask` bool `[tokens]` says which tokens are trained, None: all.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    mask: NDArray[np.bool_] | None


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

    This is what the template marks by `{% generation %}`. Without marks, a turn of the assistant is
    the text of the messages up to it, minus the text of the messages before it with the generation
    prompt, up to the last special token: the end of the turn. Nothing is added to the template's
    text.
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
    def _special(self) -> re.Pattern[str]:
        added = self._backend.get_added_tokens_decoder().values()
        names = sorted((one.content for one in added if one.special), key=len, reverse=True)
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
        for document in documents:
            conversation = Conversation.from_text(document)
            try:
                some, mask = self.one(conversation)
            except ValueError as error:
                told = f"{conversation.where}: {error}"
                if skip is None:
                    more = "data.on_error=skip passes over such conversations"
                    raise DataError(f"{told}. {more}") from error
                skip(told)
                continue
            ids.append(some)
            masks.append(mask)
        lengths = np.array([len(some) for some in ids], dtype=np.int64)
        none = np.empty(0, dtype=np.int64)
        mask = np.concatenate([none.astype(bool), *masks])
        return Encoded(np.concatenate([none, *ids]), lengths, mask)

    def one(self, conversation: Conversation) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the ids of a conversation and its mask; raises ValueError with the reason.

        Reasons: the template refuses it, the trained text cannot be located exactly, or nothing is
        trained.
        """
        self._refuse_quoted(conversation.messages)
        rendered = self.template.render(conversation.messages, conversation.tools)
        if self.template.has_marks:
            if any(one["role"] == ASSISTANT for one in conversation.messages[: conversation.first]):
                raise ValueError("the template marks turns of its prompt, which is not trained")
            spans = list(rendered.marked)
        else:
            spans = list(self._spans(conversation, rendered.text))
        encoding = self._backend.encode(rendered.text, add_special_tokens=False)
        mask = _covered(np.array(encoding.offsets).reshape(-1, 2), spans, rendered.text)
        if not mask[1:].any():  # the first token is nobody's target
            raise ValueError("the template marks no token of it as the assistant's")
        return np.array(encoding.ids, dtype=np.int64), mask

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids that precede the assistant's answer; raises ValueError."""
        self._refuse_quoted(messages)
        text = self.template.render(messages, prompts=True).text
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def turn_ends(self) -> list[int]:
        """Return the ids of special tokens that end a turn of the assistant, and of a document."""
        found = {self.tokenizer.eos_id}
        try:
            ids, mask = self.one(Conversation("a probe", _PROBE))
        except ValueError:
            return sorted(found)
        last = int(ids[mask][-1])
        added = self._backend.get_added_tokens_decoder()
        return sorted(found | ({last} if last in added and added[last].special else set()))

    def _refuse_quoted(self, messages: Sequence[Message]) -> None:
        """Refuse a text that quotes a special token, which would end a turn or begin one."""
        for number, message in enumerate(messages, 1):
            for value in message.values():
                if isinstance(value, str) and (found := self._special.search(value)):
                    raise ValueError(f"message {number} quotes the special token {found[0]!r}")

    def _spans(self, conversation: Conversation, whole: str) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the assistant's turns, told by rendering what is before them."""
        messages, tools = conversation.messages, conversation.tools
        for number in range(conversation.first, len(messages)):
            if messages[number]["role"] != ASSISTANT:
                continue
            asked = self.template.render(messages[:number], tools, prompts=True).text
            before = self.template.render(messages[:number], tools).text
            until = self.template.render(messages[: number + 1], tools).text
            if not (until.startswith(asked) and whole.startswith(until)):
                other = "the turns after it" if until.startswith(asked) else "the prompt for it"
                raise ValueError(
                    f"the chat template writes turn {number + 1} differently with {other}, so "
                    "what is trained cannot be located exactly. Mark it in the template: "
                    "{% generation %}...{% endgeneration %}"
                )
            content = messages[number]["content"]
            said = until[len(asked) :]
            if asked == before and isinstance(content, str) and not (
                said.lstrip().startswith(content.strip())
            ):  # fmt: skip
                raise ValueError(
                    "the chat template has no prompt for an answer (add_generation_prompt) and "
                    f"writes {said[:20]!r} before it, which is not the assistant's. Mark answers "
                    "in the template: {% generation %}...{% endgeneration %}"
                )
            ends = [found.end() for found in self._special.finditer(said)]
            yield len(asked), len(asked) + (ends[-1] if ends else len(said))


Encoder = TextEncoder | ChatEncoder


@dataclass(frozen=True)
class Encoding:
    """The settings of an encoder: `data.tokenizer`, `eos`, `format` and `chat_template`."""

    tokenizer: str
    eos: str | None
    form: DataFormat = "text"
    template: str | None = None

    def load(self) -> Encoder:
        """Return the encoder; raises DataError if it is not available."""
        return encoder_of(load_tokenizer(self.tokenizer, self.eos), self.form, self.template)


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
    """Return which tokens lie in spans of characters; ValueError where one lies half in one."""
    mask = np.zeros(len(offsets), dtype=bool)
    starts, stops = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    for first, last in spans:
        touches, inside = (starts < last) & (stops > first), (starts >= first) & (stops <= last)
        if (touches & ~inside).any():
            at = int(np.argmax(touches & ~inside))
            token = text[offsets[at, 0] : offsets[at, 1]]
            raise ValueError(
                f"the token {token!r} is in part the assistant's and in part the template's, so "
                "what is trained cannot be located exactly"
            )
        mask |= inside
    return mask
