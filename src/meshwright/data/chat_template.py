"""The template that renders a conversation as text: where it is read, and what it does with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshwright.data.messages import (
    ASSISTANT,
    REASONING,
    Message,
    named_once,
    with_arguments,
)
from meshwright.data.template_engine import MARKS, Compiled, TemplateMarks
from meshwright.errors import DataError
from meshwright.files import read_bytes, reading, sha256_bytes
from meshwright.parsing import parse_json

TEMPLATE, CONFIG, SPECIAL = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
_TOKENS: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Texts by which it is found out what a template does with a message.
_ASKED: Final[Message] = {"role": "user", "content": "a"}
_SAID: Final[Message] = {"role": ASSISTANT, "content": "b"}
_PROBE: Final = "probe 5 of what a template writes"
# Fields of messages that only tell a program which message is meant.
_NAMES_ONLY: Final = frozenset({"role", "content", "id", "tool_call_id", *REASONING})


class TextSpan(NamedTuple):
    """A range of characters of a rendered text, and the number of the message that wrote it."""

    start: int
    stop: int
    message: int | None


class Rendered(NamedTuple):
    """A rendered text, the spans marked as the assistant's, and the spans that each message wrote.

    `turns` is empty if that was not asked, or if it cannot be told.
    """

    text: str
    marked: tuple[TextSpan, ...]
    turns: tuple[TextSpan, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A template's source, the special tokens that it may name, and where it was read.

    `digest` is the SHA-256 of both.
    """

    source: str
    tokens: Mapping[str, str]
    origin: str

    @property
    def digest(self) -> str:
        """The SHA-256 of the source and the special tokens, which determine all that it renders."""
        return sha256_bytes(json.dumps([self.source, dict(self.tokens)]).encode())

    def files(self) -> dict[str, bytes]:
        """Return the files next to a tokenizer.json from which `load_template` reads it."""
        special = json.dumps(dict(self.tokens), indent=1, ensure_ascii=False)
        return {TEMPLATE: self.source.encode(), SPECIAL: special.encode()}

    @property
    def has_marks(self) -> bool:
        """Whether the template marks the assistant's text by `{% generation %}`."""
        return bool(self._compiled.has_marks)

    @cached_property
    def _compiled(self) -> Compiled:
        return Compiled(self.source, self.origin)

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in ("source", "tokens", "origin")}

    def render(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        documents: Any = None,
        options: Mapping[str, Any] | None = None,
        *,
        prompts: bool = False,
        has_turns: bool = False,
    ) -> Rendered:
        """Return messages as text; `prompts` appends the prompt for the assistant's answer.

        Messages are what transformers' `apply_chat_template` makes of them, and calls have their
        arguments as the template reads them. `options` are further values for the template.
        `has_turns`: also return what each message wrote. Raises ValueError if the template refuses
        them, fails, or exceeds its limits.
        """
        form = self.arguments if any("tool_calls" in message for message in messages) else "either"
        ready = [
            with_arguments({key: part for key, part in message.items() if part is not None}, form)
            for message in named_once(messages)
        ]
        values = {"messages": ready, "tools": tools, "documents": documents}
        values = {**self.tokens, **(options or {}), **values, "add_generation_prompt": prompts}
        return self._rendered(values, ready if has_turns else None)

    def _rendered(self, values: Mapping[str, Any], messages: list[Message] | None) -> Rendered:
        written = json.dumps(values, ensure_ascii=False)
        marks = next(
            (candidate for candidate in MARKS if not any(map(written.__contains__, candidate))),
            None,
        )
        if marks is None:
            raise ValueError("it has characters of Unicode's private areas that mark answers here")
        plain = _without_marks(self._compiled.run(values, marks), marks)
        if messages is None:
            return plain
        located = _without_marks(self._compiled.run(values, marks, messages), marks)
        return located if located.text == plain.text else plain

    @cached_property
    def arguments(self) -> str:
        """How the template reads the arguments of a call: "object", "text" of JSON, or "either"."""
        texts = [self._probed_call(value) for value in ({"k": "v"}, '{"k": "v"}')]
        if texts[0] is None:
            return "either" if texts[1] is None else "text"
        return "either" if texts[0] == texts[1] else "object"

    def _probed_call(self, arguments: Any) -> str | None:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function}
        messages = [_ASKED, {**_SAID, "content": "", "tool_calls": [call]}]
        values = {**self.tokens, "messages": messages, "tools": None, "documents": None}
        try:
            return self._rendered({**values, "add_generation_prompt": False}, None).text
        except ValueError:
            return None

    def reads(self, name: str) -> bool:
        """Whether the source names a field or a variable at all."""
        return name in self._compiled.names

    def check(self, messages: Sequence[Message]) -> None:
        """Raise ValueError if the template drops the calls of an answer, or a whole message."""
        if any("tool_calls" in message for message in messages) and not self.reads("tool_calls"):
            raise ValueError("the chat template does not write tool_calls")
        for role in sorted({str(message["role"]) for message in messages} - {"user", ASSISTANT}):
            if not self._writes(role):
                raise ValueError(f"the chat template leaves out messages of the role {role!r}")

    def unread(self, messages: Sequence[Message]) -> set[str]:
        """Return the fields of messages that the template does not read."""
        fields = {key for message in messages for key in message}
        unread = {key for key in fields - _NAMES_ONLY if not self.reads(key)}
        if fields & {*REASONING} and not any(map(self.reads, REASONING)):
            unread.add("reasoning_content")
        return unread

    @cached_property
    def _written_roles(self) -> dict[str, bool]:
        return {}

    def _writes(self, role: str) -> bool:
        """Whether the template writes the content of a role's messages, found by a probe."""
        if role not in self._written_roles:
            message = {"role": role, "content": _PROBE, "name": "f", "tool_call_id": "call00000"}
            call = {"id": "call00000", "type": "function"}
            called: Message = {
                **_SAID,
                "tool_calls": [{**call, "function": {"name": "f", "arguments": {}}}],
            }
            before = [_ASKED, called] if role == "tool" else []
            after: list[Message] = [_SAID] if role == "tool" else [_ASKED, _SAID]
            try:
                text = self.render([*before, message, *after]).text
            except ValueError:
                text = _PROBE  # it may be written elsewhere
            self._written_roles[role] = _PROBE in text
        return self._written_roles[role]


def load_template(tokenizer_file: Path, template_file: str | None = None) -> ChatTemplate:
    """Return the template beside a `tokenizer.json`, or the one in `template_file`.

    `chat_template.jinja` comes before `chat_template` of tokenizer_config.json; of several there,
    the one named "default" is used. Raises DataError if there is no usable one.
    """
    config = json_object(tokenizer_file.with_name(CONFIG))
    special = json_object(tokenizer_file.with_name(SPECIAL)) | config
    tokens = {f"{name}_token": text for name in _TOKENS if (text := _text(special, name))}
    file = Path(template_file) if template_file else tokenizer_file.with_name(TEMPLATE)
    if template_file or file.is_file():
        if not file.is_file():
            raise DataError(f"data.chat_template = {template_file!r} is no file")
        with reading(file):
            content, origin = read_bytes(file), str(file)
        try:
            source = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 text: byte {error.start}") from error
    else:
        source = _stated(config.get("chat_template"))
        origin = f"chat_template of {tokenizer_file.with_name(CONFIG)}"
    if not source:
        raise DataError(
            f"no chat template beside {tokenizer_file}: neither {TEMPLATE} nor chat_template of "
            f"{CONFIG}. Name a file of one with data.chat_template"
        )
    template = ChatTemplate(source, tokens, origin)
    _ = template.has_marks  # compiled now: its faults are found before anything is read
    return template


def _without_marks(text: str, marks: TemplateMarks) -> Rendered:
    """Return a text without its marks, and the spans that they enclosed."""
    parts: list[str] = []
    marked: list[TextSpan] = []
    turns: list[TextSpan] = []
    loops: list[tuple[str, int]] = []  # the loops over messages that are open, and where they are
    length, opened, last = 0, -1, None
    pattern = f"([{marks.begin}{marks.end}]|{marks.turn}[^{marks.turn_end}]*{marks.turn_end})"
    for number, part in enumerate(re.split(pattern, text)):
        current = loops[-1][1] if loops else None
        if number % 2 == 0:
            parts.append(part)
            if part and turns and turns[-1].stop == length and turns[-1].message == current:
                turns[-1] = turns[-1]._replace(stop=length + len(part))
            elif part and current is not None:
                turns.append(TextSpan(length, length + len(part), current))
            length += len(part)
        elif part == marks.begin:
            opened = length
        elif part == marks.end:
            if length > opened >= 0:
                marked.append(TextSpan(opened, length, last if current is None else current))
                opened = -1
        else:
            loop, _, message = part[1:-1].partition(" ")
            if loops and loops[-1][0] == loop:
                loops.pop()
            if message:
                last = int(message)
                loops.append((loop, last))
    return Rendered("".join(parts), tuple(marked), tuple(turns))


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty if there is no file.

    Raises DataError for a file that is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        with reading(path):
            return dict(parse_json(read_bytes(path)))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is not a JSON object: {error}") from error


def _text(config: Mapping[str, Any], name: str) -> str | None:
    token = config.get(f"{name}_token")
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _stated(value: object) -> str:
    """Return a config's template, the one named "default" of several; empty where it has none."""
    if isinstance(value, list):
        named = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
        value = named.get("default")
    return value if isinstance(value, str) else ""
