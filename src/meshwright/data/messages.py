"""Messages of rows in the form that templates read: roles, texts, calls of tools, what is trained.

Published rows write the same turn in several ways. What a turn is trained on, refused for, or left
out of is decided here, before a template sees it.
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
    """The messages of a row, the numbers of those that are trained, and fields of no use."""

    messages: list[Message] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)

    def add(self, message: Message, is_trained: bool) -> None:
        """Append a message; only the assistant's are trained."""
        if is_trained and message["role"] == ASSISTANT:
            self.trained.append(len(self.messages))
        self.messages.append(message)

    def prepend(self, message: Message) -> None:
        """Insert a message before all others."""
        self.messages.insert(0, message)
        self.trained = [number + 1 for number in self.trained]


def add_messages(turns: Turns, value: object, name: str, *, are_trained: bool = True) -> None:
    """Append a list of messages with `role` and `content`, or of turns with `from` and `value`.

    `name` is that of the row's field. Raises ValueError for anything else.
    """
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        value = parse_json(value)  # tables have texts only
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {name!r} is no list of messages")
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
    """Append a message that is a text."""
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
    """Return the calls that a turn of LLaMA-Factory's `function_call` has as JSON."""
    try:
        calls = parse_json(text)
    except ValueError as error:
        raise ValueError(f"turn {number}, a function_call, is not JSON: {error}") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ValueError(f"turn {number}, a function_call, has no name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _is_trained(turns: Turns, message: Message, number: int) -> bool:
    """Remove the training flags of a message and return whether it is trained."""
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
    """Return a message with its call as `tool_calls`; ValueError if it is empty or not text."""
    call = message.pop("function_call", None)
    if call is not None and "tool_calls" not in message:
        message["tool_calls"] = [{"type": "function", "function": call}]
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        calls = message["tool_calls"] = parse_json(calls) if calls.strip() else []
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(entry, dict) for entry in calls)
    ):
        raise ValueError(f"message {number}: its tool_calls are no list of calls")
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
    """Return the content of a message as one text."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content if isinstance(content, str) else ""


def texts_in(value: object) -> Iterator[str]:
    """Yield every text in a value, names of fields included, and the parts of a content joined.

    A template can write parts one after the other, so that two of them make a token.
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
    """Return a message whose calls have their arguments as an "object" or as a "text" of JSON.

    Raises ValueError for a text that is no JSON object.
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
            raise ValueError(f"the arguments {arguments!r:.80} of a tool call are no JSON object")
        return {**call, "arguments": parsed}
    return call


def named_once(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages with their reasoning under both names that templates read.

    As in transformers, `_alias_reasoning_fields`.
    """
    renamed = []
    for message in messages:
        reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
        alias = {} if reasoning is None else {"reasoning_content": reasoning}
        renamed.append(
            {**({} if reasoning is None else {"thinking": reasoning}), **message, **alias}
        )
    return renamed
