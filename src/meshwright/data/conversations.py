"""Conversations in rows of data: the supported formats, converted to one line of JSON each.

`messages` with roles; `prompt` and `completion`, texts or lists of messages; ShareGPT's
`conversations` with `from` and `value`; Alpaca's `instruction`, `input`, `output` and `history`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from meshwright.data.messages import ASSISTANT, Message, Turns, add_messages, add_text, text_of
from meshwright.data.padding import decoded_tools, without_padding
from meshwright.errors import nearest, refusal
from meshwright.parsing import parse_json

# Fields of a row that make a conversation, the first set of them that a row has.
FORMS: Final = (
    ("messages",),
    ("conversations",),
    ("conversation",),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
)
# Where Alpaca's and Dolly's rows have what an instruction is about.
_INPUTS: Final = ("input", "context")
_SYSTEMS: Final = ("system", "system_prompt")
# What goes to the template beside the messages.
_OPTIONS: Final = "chat_template_kwargs"
_MEDIA: Final = ("image", "images", "audio", "audios", "video", "videos")
# Arguments of every template, which a row does not set.
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True)
class Conversation:
    """Messages in the form of templates, their origin, and which of them are trained.

    `trained` are the numbers of messages of the assistant. `tools`, `documents` and `options` go to
    the template. `unused` are the row's fields that nothing reads.
    """

    where: str
    messages: tuple[Message, ...]
    trained: tuple[int, ...]
    tools: Any = None
    documents: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of `ChatTemplate.render` besides the messages."""
        return {"tools": self.tools, "documents": self.documents, "options": self.options}

    def to_text(self) -> str:
        """Return it as a line of JSON, a document's text between source and store."""
        return json.dumps(list(vars(self).values()), ensure_ascii=False)

    @staticmethod
    def from_text(text: str) -> Conversation:
        """Return the conversation that `to_text` has written."""
        where, messages, trained, tools, documents, options, unused = json.loads(text)
        lists = tuple(messages), tuple(trained)
        return Conversation(where, *lists, tools, documents, options, tuple(unused))


@dataclass(frozen=True)
class TextRows:
    """Reads the field `key` of rows as documents."""

    key: str

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return which of a table's columns are read; raises ValueError if one is missing."""
        if self.key not in names:
            raise ValueError(_no_field(self.key, dict.fromkeys(names)))
        return [self.key]

    def document(self, row: object, where: str, *, is_padded: bool = False) -> str:
        """Return the document of a row; raises ValueError if it has none."""
        del where, is_padded
        fields = _object(row)
        if self.key not in fields:
            raise ValueError(_no_field(self.key, fields))
        text = fields[self.key]
        if not isinstance(text, str):
            raise ValueError(f"field {self.key!r} is a {type(text).__name__}, not text")
        if not text.isascii():
            text.encode()  # a lone surrogate, legal in JSON, is not Unicode text
        return text


@dataclass(frozen=True)
class ChatRows:
    """Reads the conversations of rows, see `Conversation.to_text`."""

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return which of a table's columns are read, all; raises ValueError if none fit."""
        _form(dict.fromkeys(names))
        return list(names)

    def document(self, row: object, where: str, *, is_padded: bool = False) -> str:
        """Return the conversation of a row as text; raises ValueError if it has none.

        `is_padded`: objects in the row may have fields of other rows' objects, as nulls.
        """
        text = conversation_of(row, where, is_padded=is_padded).to_text()
        if not text.isascii():
            text.encode()
        return text


RowReader = TextRows | ChatRows


def conversation_of(row: object, where: str, *, is_padded: bool = False) -> Conversation:
    """Return the conversation of a row; raises ValueError for an unknown format."""
    values = {key: value for key, value in _object(row).items() if value is not None}
    if is_padded:
        values = without_padding(values)
    form = _form(values)
    fields = _Fields(values)
    turns = Turns()
    if len(form) == 1:
        add_messages(turns, fields.take(form[0]), form[0])
    elif form[0] == "instruction":
        _add_instruction(turns, fields, form[1])
    else:
        for name, role in zip(form, ("user", ASSISTANT), strict=True):
            _add_side(turns, fields.take(name), name, role, is_trained=role == ASSISTANT)
    _add_system(turns, fields)
    if any(values.get(name) for name in _MEDIA):
        name = next(name for name in _MEDIA if values.get(name))
        raise ValueError(f"field {name!r}: only text is read")
    if not turns.trained:
        reason = "it has no turn of the assistant that is trained"
        raise ValueError(f"{reason}: there is nothing to learn from it")
    return Conversation(
        where,
        tuple(turns.messages),
        tuple(turns.trained),
        fields.tools(),
        fields.documents(),
        fields.options(),
        tuple(sorted(turns.unused | fields.unused())),
    )


class _Fields:
    """The fields of a row, with a record of which were read."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row, self._taken = row, set(_MEDIA)

    def take(self, name: str) -> Any:
        self._taken.add(name)
        return self._row.get(name)

    def decoded(self, name: str) -> Any:
        """Return a field that may be a text of JSON."""
        value = self.take(name)
        if isinstance(value, str):
            return parse_json(value) if value.strip() else None
        return value

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise ValueError(f"field {name!r} is a {type(value).__name__}, not text")
        return value

    def first_text(self, names: Sequence[str]) -> str:
        """Return the first text among some fields that is not empty; empty without one."""
        return next((self.text(name) for name in names if self._row.get(name)), "")

    def tools(self) -> Any:
        tools = decoded_tools(self.take("tools"))
        if tools is None or (
            isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        ):
            return tools
        raise ValueError("field 'tools' is no list of tools")

    def documents(self) -> Any:
        """Return the row's `documents` where they are a list of objects, else None."""
        documents = self._row.get("documents")
        if isinstance(documents, list) and all(
            isinstance(document, dict) for document in documents
        ):
            return self.take("documents")
        return None

    def options(self) -> dict[str, Any]:
        options = dict(self.decoded(_OPTIONS) or {})
        if isinstance(self._row.get("enable_thinking"), bool):
            options.setdefault("enable_thinking", self.take("enable_thinking"))
        if reserved := _RESERVED & options.keys():
            raise ValueError(f"field {_OPTIONS!r} sets {min(reserved)!r}, which is the row's own")
        return options

    def unused(self) -> set[str]:
        return {
            name for name, value in self._row.items() if name not in self._taken and value != ""
        }


def _add_instruction(turns: Turns, fields: _Fields, answer: str) -> None:
    history = fields.decoded("history") or []
    if not isinstance(history, list):
        raise ValueError("field 'history' is no list of pairs of a question and its answer")
    for pair in history:
        if not (isinstance(pair, list | tuple) and [type(part) for part in pair] == [str, str]):
            raise ValueError("field 'history' is no list of pairs of a question and its answer")
        add_text(turns, "user", pair[0])
        add_text(turns, ASSISTANT, pair[1])
    instruction, context = fields.text("instruction"), fields.first_text(_INPUTS)
    add_text(turns, "user", f"{instruction}\n\n{context}" if context else instruction)
    add_text(turns, ASSISTANT, fields.text(answer))


def _add_side(turns: Turns, value: Any, name: str, role: str, *, is_trained: bool) -> None:
    is_text = isinstance(value, str) and not _is_messages(value)
    if is_text:
        add_text(turns, role, value, is_trained=is_trained)
    else:
        add_messages(turns, value, name, are_trained=is_trained)


def _is_messages(text: str) -> bool:
    """Whether a text of a table is a list of messages as JSON."""
    if not text.startswith("[{"):
        return False
    try:
        messages = parse_json(text)
    except ValueError:
        return False
    return all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    )


def _add_system(turns: Turns, fields: _Fields) -> None:
    """Put a row's own system text before its messages."""
    system = fields.first_text(_SYSTEMS)
    if not system:
        return
    inside = [message for message in turns.messages if message["role"] in ("system", "developer")]
    if not inside:
        turns.prepend({"role": "system", "content": system})
    elif text_of(inside[0]) != system:
        raise ValueError("it has two system texts: a field of the row, and a message")


def _object(row: object) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"the row is a JSON {type(row).__name__}, not an object")
    return row


def _form(row: Mapping[str, Any]) -> tuple[str, ...]:
    for form in FORMS:
        if all(name in row for name in form):
            return form
    if {"chosen", "rejected"} <= row.keys():
        rule = "'chosen' and 'rejected' are answers to compare, and conversations have one answer"
        hint = "Rename 'chosen' to 'completion', or to 'messages' if it has the whole conversation"
        raise ValueError(refusal(rule, hint=hint))
    known = ", ".join(" and ".join(form) for form in FORMS)
    fields = ", ".join(map(str, list(row)[:5])) or "none"
    raise ValueError(f"no conversation: a row has {known}; this one's fields are {fields}")


def _no_field(key: str, row: Mapping[str, Any]) -> str:
    rule = f"no field {key!r}"
    for form in FORMS:
        if all(name in row for name in form):
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
