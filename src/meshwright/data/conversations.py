"""Converts rows of conversation data sets to one common form, a `Conversation`.

Supported formats: `messages` with roles; `prompt` and `completion`, as texts or lists of messages;
ShareGPT's `conversations` with `from` and `value`; Alpaca's `instruction`, `input`, `output` and
`history`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from meshwright.errors import nearest, refusal
from meshwright.parsing import parse_json

ASSISTANT: Final = "assistant"
ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
# Names under which a message has its reasoning; of several, the first one counts.
REASONING: Final = ("reasoning_content", "thinking", "reasoning")
# Marks of a turn that is trained or not: OpenAI's, Axolotl's two and ms-swift's.
_TRAINED: Final = ("weight", "train", "training", "loss")
# Axolotl's ranges of characters of a turn that are trained.
_RANGES: Final = ("train_detail", "training_detail")
Message = dict[str, Any]


@dataclass
class Turns:
    """Collects the messages of a row while it is read.

    `trained` are the indices of those to train on, `unused` the names of the row's fields that have
    no effect.
    """

    messages: list[Message] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)

    def add(self, message: Message, is_trained: bool) -> None:
        """Append a message; only one of the assistant is ever trained on."""
        if is_trained and message["role"] == ASSISTANT:
            self.trained.append(len(self.messages))
        self.messages.append(message)

    def prepend(self, message: Message) -> None:
        """Insert a message before all others and renumber the trained ones."""
        self.messages.insert(0, message)
        self.trained = [number + 1 for number in self.trained]


def add_messages(turns: Turns, value: object, name: str, *, are_trained: bool = True) -> None:
    """Append a list of messages with `role` and `content`, or of turns with `from` and `value`.

    `value` may also be such a list as JSON text. `name` is the row's field that it comes from, for
    messages. Raises ValueError for anything else.
    """
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        value = parse_json(value)  # tables have texts only
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {name!r} is not a list of messages")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} of {name!r} is a {type(message).__name__}")
        fields = {key: part for key, part in message.items() if part is not None}
        if "from" in fields and "role" not in fields:
            fields = _from_share_gpt(turns, fields, number)
        if not isinstance(fields.get("role"), str):
            raise ValueError(f"message {number} of {name!r} has no role")
        if fields["role"] == "function_call" and isinstance(fields.get("content"), str):
            fields["tool_calls"] = _calls(fields.pop("content"), number)
        fields["role"] = ROLES.get(fields["role"], fields["role"])
        is_trained = _is_trained(turns, fields, number) and are_trained
        turns.add(_checked(fields, number), is_trained)


def add_text(turns: Turns, role: str, text: str, *, is_trained: bool = True) -> None:
    """Append a message whose content is `text`."""
    turns.add({"role": role, "content": text}, is_trained)


def _from_share_gpt(turns: Turns, turn: Message, number: int) -> Message:
    speaker, text = turn["from"], turn.get("value")
    if not isinstance(text, str):
        raise ValueError(f"turn {number} of 'conversations' has no text under 'value'")
    if speaker not in ROLES:
        legal = nearest(str(speaker), ROLES) or ["human", "gpt", "system"]
        raise ValueError(refusal(f"turn {number} is from {speaker!r}", legal=legal))
    known: Message = {key: turn[key] for key in (*_TRAINED, *_RANGES, *REASONING) if key in turn}
    unused = turn.keys() - known.keys() - {"from", "value"}
    turns.unused |= {f"{key} of turns" for key in unused}
    return {"role": speaker, "content": text, **known}


def _calls(text: str, number: int) -> list[Message]:
    """Return the tool calls of a LLaMA-Factory `function_call` turn, whose text is JSON."""
    try:
        calls = parse_json(text)
    except ValueError as error:
        raise ValueError(f"turn {number}, a function_call, is not JSON: {error}") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ValueError(f"turn {number}, a function_call, has no name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _is_trained(turns: Turns, message: Message, number: int) -> bool:
    """Remove the training flags of a message and return whether all of them allow training."""
    for key in _RANGES:
        if message.pop(key, None):
            raise ValueError(f"message {number} has {key}: a turn is trained as a whole or not")
    flags = []
    for key in _TRAINED:
        value = message.pop(key, None)
        if value is None:
            continue
        if value not in (0, 1):
            rule = f"message {number} has {key} = {value!r}: a turn is trained or not"
            raise ValueError(refusal(rule, legal=[0, 1]))
        flags.append(bool(value))
        if value and key != "weight" and message["role"] != ASSISTANT:
            turns.unused.add(f"{key} of turns that are not the assistant's")
    return all(flags)


def _checked(message: Message, number: int) -> Message:
    """Return a message with a legacy `function_call` converted to `tool_calls`.

    Raises ValueError if the message is empty or has content other than text.
    """
    call = message.pop("function_call", None)
    if call is not None and "tool_calls" not in message:
        message["tool_calls"] = [{"type": "function", "function": call}]
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        calls = message["tool_calls"] = parse_json(calls) if calls.strip() else []
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(entry, dict) for entry in calls)
    ):
        raise ValueError(f"message {number}: its tool_calls are not a list of calls")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"message {number} has a part of type {kind!r}, only text is read")
            if not isinstance(part.get("text"), str):
                raise ValueError(f"message {number} has a part of type 'text' without a text")
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"message {number}: its content is a {type(content).__name__}, not text")
    says = any(message.get(key) for key in ("tool_calls", *REASONING))
    if content is None and not says and message["role"] != "tool":
        raise ValueError(f"message {number} has neither content nor tool_calls")
    return message


def text_of(message: Mapping[str, Any]) -> str:
    """Return the content of a message as one string; parts of a list are concatenated."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content if isinstance(content, str) else ""


def texts_in(value: object) -> Iterator[str]:
    """Yield every string in a nested value, including field names and concatenated content parts.

    A template can write parts one after the other, so that two of them form a special token.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from texts_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from texts_in(part)
        texts = [part.get("text") for part in value if isinstance(part, Mapping)]
        if len(texts) > 1:
            yield "".join(text for text in texts if isinstance(text, str))


def with_arguments(message: Mapping[str, Any], form: str) -> Message:
    """Return a message with the arguments of its tool calls in the given form.

    `form` is "object", "text" (JSON), or "either", which changes nothing. Raises ValueError for a
    text that is not a JSON object.
    """
    calls = message.get("tool_calls")
    if form == "either" or not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_call_with_arguments(call, form) for call in calls]}


def _call_with_arguments(call: Message, form: str) -> Message:
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _call_with_arguments(inner, form)}
    arguments = call.get("arguments")
    if form == "text" and isinstance(arguments, dict | list):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if form == "object" and isinstance(arguments, str):
        parsed = parse_json(arguments) if arguments.strip() else {}
        if not isinstance(parsed, dict):
            raise ValueError(
                f"the arguments {arguments!r:.80} of a tool call are not a JSON object"
            )
        return {**call, "arguments": parsed}
    return call


def named_once(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages with their reasoning under both `reasoning_content` and `thinking`.

    Templates read either name; transformers does the same in `_alias_reasoning_fields`.
    """
    renamed = []
    for message in messages:
        reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
        alias = {} if reasoning is None else {"reasoning_content": reasoning}
        renamed.append(
            {**({} if reasoning is None else {"thinking": reasoning}), **message, **alias}
        )
    return renamed


_HINT: Final = "Store arguments as texts of JSON, or rows as jsonl, which keep nulls as written"


def without_padding(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's row without the nulls that only give all rows the same fields.

    Raises ValueError for a null argument of a tool call that may be intended.
    """
    schemas = _schemas(_dropped(decoded_tools(row.get("tools"))))
    return {key: _without(value, schemas) for key, value in row.items()}


def decoded_tools(value: Any) -> Any:
    """Return a row's tool definitions, parsed if they, or each of them, are stored as JSON text."""
    if isinstance(value, str):
        value = parse_json(value) if value.strip() else None
    if isinstance(value, list):
        return [parse_json(tool) if isinstance(tool, str) else tool for tool in value]
    return value


def _without(value: Any, schemas: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_without(part, schemas) for part in value]
    if not isinstance(value, dict):
        return value
    cleaned = {key: _without(part, schemas) for key, part in value.items() if part is not None}
    if isinstance(value.get("arguments"), dict) and isinstance(value.get("name"), str):
        name = value["name"]
        cleaned["arguments"] = _arguments(value["arguments"], schemas.get(name), name)
    return cleaned


def _arguments(value: Any, schema: Any, name: str) -> Any:
    """Return a tool call's arguments without nulls that the tool's JSON `schema` does not declare.

    A required argument stays null. Raises ValueError for a null argument that is optional, or if
    there is no schema.
    """
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, list):
        return [_arguments(part, schema.get("items"), name) for part in value]
    if not isinstance(value, dict):
        return value
    cleaned, declared = {}, schema.get("properties")
    for key, part in value.items():
        if part is not None:
            inner = declared.get(key) if isinstance(declared, Mapping) else None
            cleaned[key] = _arguments(part, inner, name)
        elif not isinstance(declared, Mapping) or (
            key in declared and key not in (schema.get("required") or ())
        ):
            rule = f"the argument {key!r} of {name!r} is null, or not given: a table cannot say"
            raise ValueError(refusal(rule, hint=_HINT))
        elif key in declared:
            cleaned[key] = None
    return cleaned


def _schemas(tools: Any) -> dict[str, Any]:
    """Return the JSON schema of the parameters of each tool, by the tool's name."""
    schemas = {}
    for tool in tools if isinstance(tools, list) else ():
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get("name"), str):
            schemas[inner["name"]] = inner.get("parameters")
    return schemas


def _dropped(value: Any) -> Any:
    """Return a nested value without the null fields of its objects."""
    if isinstance(value, dict):
        return {key: _dropped(part) for key, part in value.items() if part is not None}
    return [_dropped(part) for part in value] if isinstance(value, list) else value


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
    """The messages of a row in the form that chat templates read, and which of them to train on.

    `where` is the row's origin, for messages. `trained` are the indices of assistant messages to
    train on. `tools`, `documents` and `options` are passed to the template. `unused` names fields
    of the row that nothing reads.
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
        """Return the conversation as a line of JSON, the form in which sources yield documents."""
        return json.dumps(list(vars(self).values()), ensure_ascii=False)

    @staticmethod
    def from_text(text: str) -> Conversation:
        """Return the conversation that `to_text` serialized."""
        where, messages, trained, tools, documents, options, unused = json.loads(text)
        lists = tuple(messages), tuple(trained)
        return Conversation(where, *lists, tools, documents, options, tuple(unused))


@dataclass(frozen=True)
class TextRows:
    """Reads documents from rows: the text in the field `key`."""

    key: str

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns of a table to read, here `key` only; ValueError if it is missing."""
        if self.key not in names:
            raise ValueError(_no_field(self.key, dict.fromkeys(names)))
        return [self.key]

    def document(self, row: object, where: str, *, is_padded: bool = False) -> str:
        """Return the text of a row; raises ValueError if the field is missing or not text."""
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
    """Reads conversations from rows, as documents in the JSON form of `Conversation.to_text`."""

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns to read, here all; ValueError if they match no known format."""
        _form(dict.fromkeys(names))
        return list(names)

    def document(self, row: object, where: str, *, is_padded: bool = False) -> str:
        """Return the conversation of a row in the form of `Conversation.to_text`.

        Raises ValueError if it has none.

        `is_padded` says that objects in the row may have null fields added by the table's schema.
        """
        text = conversation_of(row, where, is_padded=is_padded).to_text()
        if not text.isascii():
            text.encode()
        return text


RowReader = TextRows | ChatRows


def conversation_of(row: object, where: str, *, is_padded: bool = False) -> Conversation:
    """Return the conversation of a row, in any of the supported formats.

    `where` is the row's origin, for messages; `is_padded` as for `ChatRows.document`. Raises
    ValueError for an unknown format, and for a row without an assistant message to train on.
    """
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
    """The fields of a row, with a record of which have been read."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row, self._taken = row, set(_MEDIA)

    def take(self, name: str) -> Any:
        self._taken.add(name)
        return self._row.get(name)

    def decoded(self, name: str) -> Any:
        """Return the value of a field, parsed as JSON if it is a string."""
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
        """Return the text of the first of the named fields that is not empty, or ""."""
        return next((self.text(name) for name in names if self._row.get(name)), "")

    def tools(self) -> Any:
        tools = decoded_tools(self.take("tools"))
        if tools is None or (
            isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        ):
            return tools
        raise ValueError("field 'tools' is not a list of tools")

    def documents(self) -> Any:
        """Return the row's `documents` if they are a list of objects, else None."""
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
        raise ValueError("field 'history' is not a list of pairs of a question and its answer")
    for pair in history:
        if not (isinstance(pair, list | tuple) and [type(part) for part in pair] == [str, str]):
            raise ValueError("field 'history' is not a list of pairs of a question and its answer")
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
    """Return whether a string is a JSON list of messages with role and content."""
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
    """Insert the system prompt of a row's own field, if any, as the first message.

    Raises ValueError if the messages already have a different system prompt.
    """
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
    """Return the row reader for `data.format` "chat" or "text".

    `text_key` is the field of a text.
    """
    return ChatRows() if form == "chat" else TextRows(text_key)
