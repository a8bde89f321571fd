"""Conversations in rows of data: the supported formats, converted to one line of JSON each.

`messages` with roles; `prompt` and `completion`, texts or lists of messages; ShareGPT's
`conversations` with `from` and `value`; Alpaca's `instruction`, `input` and `output`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshwright.errors import nearest, refusal
from meshwright.parsing import parse_json

ASSISTANT: Final = "assistant"
# Fields of a row that make a conversation, the first set of them that a row has.
FORMS: Final = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "output"),
)
_FIELDS: Final = (*dict.fromkeys(field for form in FORMS for field in form), "input", "system")
_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages in the form of templates, their origin, and which of them are trained.

    The assistant's messages from `first` on are trained; `tools` goes to the template.
    """

    where: str
    messages: tuple[Message, ...]
    first: int = 0
    tools: Any = None

    def to_text(self) -> str:
        """Return it as a line of JSON, a document's text between source and store."""
        fields = [self.where, self.messages, self.first, self.tools]
        return json.dumps(fields, ensure_ascii=False)

    @staticmethod
    def from_text(text: str) -> Conversation:
        """Read what `to_text` wrote."""
        where, messages, first, tools = json.loads(text)
        return Conversation(where, tuple(messages), first, tools)


@dataclass(frozen=True)
class TextRows:
    """Reads the field `key` of rows as documents."""

    key: str

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return which of a table's columns are read; raises ValueError if one is missing."""
        if self.key not in names:
            raise ValueError(_no_field(self.key, dict.fromkeys(names)))
        return [self.key]

    def document(self, row: object, where: str) -> str:
        """Return the document of a row; raises ValueError if it has none."""
        del where
        found = _object(row)
        if self.key not in found:
            raise ValueError(_no_field(self.key, found))
        text = found[self.key]
        if not isinstance(text, str):
            raise ValueError(f"field {self.key!r} is a {type(text).__name__}, not text")
        if not text.isascii():
            text.encode()  # a lone surrogate, legal in JSON, is not Unicode text
        return text


@dataclass(frozen=True)
class ChatRows:
    """Reads the conversations of rows, see `Conversation.to_text`."""

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return which of a table's columns are read; raises ValueError if none fit."""
        _form(dict.fromkeys(names))
        return [name for name in names if name in (*_FIELDS, "tools")]

    def document(self, row: object, where: str) -> str:
        """Return the conversation of a row as text; raises ValueError if it has none."""
        text = conversation_of(row, where).to_text()
        if not text.isascii():
            text.encode()
        return text


RowReader = TextRows | ChatRows


def conversation_of(row: object, where: str) -> Conversation:
    """Return the conversation of a row; raises ValueError for an unknown format."""
    found = {key: value for key, value in _object(row).items() if value is not None}
    form, first = _form(found), 0
    if form == ("messages",):
        messages = _messages(found["messages"], "messages")
    elif form == ("conversations",):
        messages = _share_gpt(found["conversations"])
    elif form[0] in ("prompt", "question"):
        asked = _side(found, form[0], "user")
        messages = [*asked, *_side(found, form[1], ASSISTANT)]
        first = len(asked)
    else:
        asked_for, given = _text(found, "instruction"), found.get("input") or ""
        if not isinstance(given, str):
            raise ValueError(f"field 'input' is a {type(given).__name__}, not text")
        user = f"{asked_for}\n\n{given}" if given else asked_for
        system = [_message("system", _text(found, "system"))] if found.get("system") else []
        answer = _message(ASSISTANT, _text(found, "output"))
        messages = [*system, _message("user", user), answer]
    if not any(message["role"] == ASSISTANT for message in messages[first:]):
        raise ValueError("it has no turn of the assistant: there is nothing to learn from it")
    return Conversation(where, tuple(messages), first, _tools(found.get("tools")))


def _object(row: object) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"the row is a JSON {type(row).__name__}, not an object")
    return row


def _form(row: Mapping[str, Any]) -> tuple[str, ...]:
    for form in FORMS:
        if all(field in row for field in form):
            return form
    known = ", ".join(" and ".join(form) for form in FORMS)
    fields = ", ".join(map(str, list(row)[:5])) or "none"
    raise ValueError(f"no conversation: a row has {known}; this one's fields are {fields}")


def _side(row: Mapping[str, Any], field: str, role: str) -> list[Message]:
    value = row[field]
    return [_message(role, value)] if isinstance(value, str) else _messages(value, field)


def _messages(value: object, field: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {field!r} is no list of messages")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} of {field!r} has no role")
        if field != "prompt":
            _check_trained(message, number)
        _check_content(message.get("content"), number)
    # Tables fill fields that a message lacks with nulls.
    return [
        {"content": None} | {key: part for key, part in message.items() if part is not None}
        for message in value
    ]


def _check_trained(message: Mapping[str, Any], number: int) -> None:
    """Refuse an answer that its row wants left out of the loss: all answers are trained."""
    if _ROLES.get(str(message.get("role", message.get("from")))) == ASSISTANT:
        for key in ("weight", "train"):
            value = message.get(key)
            if value is not None and not value:
                what = f"message {number} has {key} = {value!r}, but all answers are trained"
                raise ValueError(
                    refusal(what, hint="Rows with 'prompt' and 'completion' train the last")
                )


def _check_content(content: object, number: int) -> None:
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"message {number} has a part of type {kind!r}, only text is read")
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"message {number}: its content is a {type(content).__name__}, not text")


def _share_gpt(value: object) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError("field 'conversations' is no list of turns")
    if isinstance(value[0], dict) and "role" in value[0]:
        return _messages(value, "conversations")
    messages = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ValueError(f"turn {number} of 'conversations' has no text under 'value'")
        _check_trained(turn, number)
        said = turn.get("from")
        if said not in _ROLES:
            legal = nearest(str(said), _ROLES) or ["human", "gpt", "system"]
            raise ValueError(refusal(f"turn {number} is from {said!r}", legal=legal))
        messages.append(_message(_ROLES[said], turn["value"]))
    return messages


def _tools(value: object) -> Any:
    """Return a row's tools; some data sets have them as a text of JSON."""
    if isinstance(value, str):
        return parse_json(value) if value.strip() else None
    return value


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} is a {type(value).__name__}, not text")
    return value


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _no_field(key: str, row: Mapping[str, Any]) -> str:
    rule = f"no field {key!r}"
    for form in FORMS:
        if all(field in row for field in form):
            fields = " and ".join(map(repr, form))
            hint = f"{fields} are halves of a dialogue, which data.format = 'chat' reads"
            if len(form) == 1:
                hint = f"{fields} is a conversation, which data.format = 'chat' reads"
            return refusal(rule, hint=hint)
    legal = nearest(key, row) or [str(name) for name in list(row)[:5]]
    return refusal(rule, legal=legal, hint="Name the field with data.text_key")


def rows_of(form: str, text_key: str) -> RowReader:
    """Return the reader of rows of a `data.format`."""
    return ChatRows() if form == "chat" else TextRows(text_key)
