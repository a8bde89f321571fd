"""Chat templates: loading the Jinja template of a tokenizer and rendering conversations with it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, wraps
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshwright.data.conversations import (
    ASSISTANT,
    REASONING,
    Message,
    named_once,
    with_arguments,
)
from meshwright.errors import DataError
from meshwright.files import read_bytes, reading, sha256_bytes
from meshwright.parsing import parse_json

_MOST_SOURCE: Final = 1 << 18  # characters of a template; known ones have at most some ten thousand
_MOST_TEXT: Final = 1 << 26  # characters of a conversation, and of each text on the way to it
_MOST_TURNS: Final = 10_000_000  # of all loops of a rendering
_MOST_SECONDS: Final = 10.0


class TemplateMarks(NamedTuple):
    """Private-use characters that mark positions in a rendered text and are then removed.

    `begin` and `end` enclose each `{% generation %}` block. `turn` and `turn_end` enclose the
    number of a loop and, at the start of an iteration, the number of the message that it processes.
    """

    begin: str
    end: str
    turn: str
    turn_end: str


# Private-use characters; the second set is for conversations that contain one of the first.
MARKS: Final = (
    TemplateMarks(*"\ue0f0\ue0f1\ue0f2\ue0f3"),
    TemplateMarks(*"\uf8f0\uf8f1\uf8f2\uf8f3"),
)


class Compiled:
    """A compiled chat template whose loop iterations, run time and text lengths are limited.

    `has_marks` is whether it has a `{% generation %}` block. `names` has every variable, attribute
    and constant of its source, so a field that is not in it is never read. Raises DataError, which
    names `origin`, if the source is not a valid template.
    """

    def __init__(self, source: str, origin: str) -> None:
        if len(source) > _MOST_SOURCE:
            size = f"{len(source)} characters, at most {_MOST_SOURCE}"
            raise DataError(f"{origin} has {size}")
        self._source, self._origin = source, origin
        self._bounds = _Bounds()
        self._environment = _environment(self._bounds)
        tree = self._parsed()
        from jinja2 import nodes

        self.has_marks = any(
            isinstance(block.call.node, nodes.ExtensionAttribute)
            for block in tree.find_all(nodes.CallBlock)
        )
        self.names = {node.name for node in tree.find_all(nodes.Name)}
        self.names |= {node.attr for node in tree.find_all(nodes.Getattr)}
        self.names |= {str(node.value) for node in tree.find_all(nodes.Const)}
        self._plain = self._compiled(tree)

    def run(
        self, values: Mapping[str, Any], marks: TemplateMarks, messages: Sequence[Any] | None = None
    ) -> str:
        """Return the text rendered from `values`, with marks around generation blocks.

        With `messages`, it also has a mark wherever a loop reaches one of them. Raises ValueError
        for any failure of the template.
        """
        self._bounds.begin(marks, messages or ())
        template = self._plain if messages is None else self._located
        parts, length = [], 0
        try:
            for part in template.generate(**values):
                length += len(part)
                self._bounds.check(length)
                parts.append(part)
        except MemoryError:
            raise ValueError("the chat template makes a text that does not fit") from None
        except Exception as error:  # a template can raise whatever Python does
            raise ValueError(f"the chat template fails: {error!s:.200}") from error
        return "".join(parts)

    @cached_property
    def _located(self) -> Any:
        return self._compiled(_with_turns(self._parsed()))

    def _parsed(self) -> Any:
        from jinja2 import TemplateError

        try:
            return self._environment.parse(self._source)
        except (TemplateError, RecursionError) as error:
            raise self._refused(error) from error

    def _compiled(self, tree: Any) -> Any:
        from jinja2 import TemplateError, nodes

        try:
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
            code = self._environment.compile(_measured(tree))
            return self._environment.template_class.from_code(
                self._environment, code, self._environment.make_globals(None)
            )
        except (TemplateError, RecursionError) as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> DataError:
        return DataError(f"{self._origin} is not a Jinja template: {error!s:.200}")


class _Bounds:
    """The limits of one rendering, how much of them is used, and the marks to write."""

    marks = MARKS[0]

    def begin(self, marks: TemplateMarks, messages: Sequence[Any]) -> None:
        self.marks, self._turns, self._ends = marks, 0, time.monotonic() + _MOST_SECONDS
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._begun: set[int] = set()  # loops that have reached a message

    def turn(self, value: Any, loop: int) -> str:
        """Return the mark of a loop's iteration, or "" if its value is not a message."""
        number = self._numbers.get(id(value))
        if number is None:
            return ""
        self._begun.add(loop)
        return f"{self.marks.turn}{loop} {number}{self.marks.turn_end}"

    def loop_end(self, loop: int) -> str:
        """Return the mark that ends a loop, or "" if the loop did not reach any message."""
        if loop not in self._begun:
            return ""
        self._begun.remove(loop)
        return f"{self.marks.turn}{loop}{self.marks.turn_end}"

    def check(self, length: int = 0) -> None:
        if length > _MOST_TEXT:
            raise ValueError(f"a text of more than {_MOST_TEXT} characters")
        if time.monotonic() > self._ends:
            raise ValueError(f"it takes more than {_MOST_SECONDS:g} s")

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._turns += 1
            if self._turns > _MOST_TURNS:
                raise ValueError(f"more than {_MOST_TURNS} turns of its loops")
            if self._turns % 1024 == 0:
                self.check()
            yield value

    def measured(self, value: Any) -> Any:
        self.check(len(value) if isinstance(value, str | list) else 0)
        return value


def _with_turns(tree: Any) -> Any:
    """Return the syntax tree with a mark written at each iteration and at the end of a loop."""
    from jinja2 import nodes

    numbers = count()

    class Turns(_visitor()):  # type: ignore[misc]
        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            if not isinstance(node.target, nodes.Name):
                return node
            loop = nodes.Const(next(numbers))
            value = nodes.Name(node.target.name, "load")
            turn = nodes.Filter(value, "turn", [loop], [], None, None)
            node.body.insert(0, nodes.Output([turn]))
            end = nodes.Filter(loop, "loop_end", [], [], None, None)
            return [node, nodes.Output([end])]

    return Turns().visit(tree)


def _measured(tree: Any) -> Any:
    """Return the syntax tree with the length of every concatenation checked.

    Without this check, nested concatenations could double a text any number of times.
    """
    from jinja2 import nodes

    class Measure(_visitor()):  # type: ignore[misc]
        def visit_Concat(self, node: Any) -> Any:
            inside = self.generic_visit(node)
            return nodes.Filter(inside, "measured", [], [], None, None)

    return Measure().visit(tree)


def _visitor() -> Any:
    from jinja2.visitor import NodeTransformer

    return NodeTransformer


def _generation_tag(bounds: _Bounds) -> Any:
    """Return the Jinja extension for `{% generation %}`, which writes marks around its block."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{bounds.marks.begin}{caller()}{bounds.marks.end}"

    return Generation


def _environment(bounds: _Bounds) -> Any:
    """Return the Jinja environment in which transformers runs chat templates, with limits added.

    See `_compile_jinja_template` in transformers/utils/chat_template_utils.py.
    """
    from jinja2 import TemplateError, pass_context
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                raise ValueError("the operator ** is not open to chat templates")
            if operator == "%" and isinstance(left, str):
                bounds.check(_size("format", left, []))
            if operator == "*":
                sizes = [len(x) if isinstance(x, str | list | tuple) else x for x in (left, right)]
                bounds.check(abs(int(sizes[0]) * int(sizes[1])))
            return bounds.measured(super().call_binop(context, operator, left, right))

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            unwrapped = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
            text = getattr(unwrapped, "__self__", None)
            if isinstance(text, str):
                bounds.check(_size(function.__name__, text, [*args, *kwargs.values()]))
            return bounds.measured(super().call(context, function, *args, **kwargs))

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(bounds), loopcontrols]
    )
    del environment.globals["lipsum"]
    environment.filters = {
        name: _checked(name, function, bounds) for name, function in environment.filters.items()
    }
    environment.filters |= {
        "tojson": _to_json,
        "counted": bounds.counted,
        "measured": bounds.measured,
    }
    # With a context, since filters without one are evaluated once, when a template is compiled.
    environment.filters["turn"] = pass_context(lambda _, value, loop: bounds.turn(value, loop))
    environment.filters["loop_end"] = pass_context(lambda _, loop: bounds.loop_end(loop))
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment


def _to_json(value: Any, indent: Any = None, separators: Any = None, sort_keys: bool = False,
             ensure_ascii: bool = False) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip


def _checked(name: str, function: Any, bounds: _Bounds) -> Any:
    """Return a filter that checks the size of its arguments and of its result."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = [*args, *kwargs.values()]
        # The environment or the context may come before the value that is filtered.
        text_index = next(
            (index for index, argument in enumerate(arguments) if isinstance(argument, str)),
            len(arguments),
        )
        text = arguments[text_index] if text_index < len(arguments) else ""
        bounds.check(_size(name, text, [*arguments[:text_index], *arguments[text_index + 1 :]]))
        return bounds.measured(function(*args, **kwargs))

    return run


def _size(name: str, text: str, args: Sequence[Any]) -> int:
    """Return an upper bound, in characters, on what a string method or filter adds to a text.

    `name` is the method or filter and `args` its arguments. Raises ValueError for a format with a
    width of five digits or more, or a width given as an argument.
    """
    texts = [arg for arg in args if isinstance(arg, str)]
    if name in ("format", "format_map") and re.search(r"\d{5}|\*", text):
        raise ValueError(f"the width in the format {text!r:.80}")
    if name == "replace" and len(texts) >= 2:
        return len(text) + text.count(texts[0]) * len(texts[1])
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    joined = sum(len(part) + len(text) for arg in lists for part in arg if isinstance(part, str))
    widths = [abs(arg) for arg in args if isinstance(arg, int)]
    return max([joined if name == "join" else 0, *widths])


TEMPLATE, CONFIG, SPECIAL = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
_TOKENS: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Probe texts, to find out what a template does with a message.
_ASKED: Final[Message] = {"role": "user", "content": "a"}
_SAID: Final[Message] = {"role": ASSISTANT, "content": "b"}
_PROBE: Final = "probe 5 of what a template writes"
# Fields of messages that only tell a program which message is meant.
_NAMES_ONLY: Final = frozenset({"role", "content", "id", "tool_call_id", *REASONING})


class TextSpan(NamedTuple):
    """A range of characters of a rendered text, and the number of its message, if known."""

    start: int
    stop: int
    message: int | None


class Rendered(NamedTuple):
    """A rendered conversation, its spans in `{% generation %}`, and the spans of each message.

    `turns` is empty if it was not requested, or if the template does not allow locating messages.
    """

    text: str
    marked: tuple[TextSpan, ...]
    turns: tuple[TextSpan, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template's source, the special tokens that it may use, and the file it came from."""

    source: str
    tokens: Mapping[str, str]
    origin: str

    @property
    def digest(self) -> str:
        """The SHA-256 of the source and the special tokens, which determine all that it renders."""
        return sha256_bytes(json.dumps([self.source, dict(self.tokens)]).encode())

    def files(self) -> dict[str, bytes]:
        """Return the files, by name, from which `load_template` reads this template."""
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
        """Return the messages rendered as text.

        `prompts` appends the prompt for the assistant's answer.

        Before rendering, null fields are removed, reasoning is given under all names that templates
        read, and arguments of tool calls are converted to the form (object or JSON text) that the
        template reads. `options` are further variables of the template. `has_turns` also locates
        the text of each message. Raises ValueError if the template rejects the messages, fails, or
        exceeds its limits.
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
        """The form of tool-call arguments that it reads: "object", "text" (JSON) or "either"."""
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
        """Return whether the template's source mentions a field or variable of this name."""
        return name in self._compiled.names

    def check(self, messages: Sequence[Message]) -> None:
        """Raise ValueError if the template would drop tool calls, or all messages of a role."""
        if any("tool_calls" in message for message in messages) and not self.reads("tool_calls"):
            raise ValueError("the chat template does not write tool_calls")
        for role in sorted({str(message["role"]) for message in messages} - {"user", ASSISTANT}):
            if not self._writes(role):
                raise ValueError(f"the chat template leaves out messages of the role {role!r}")

    def unread(self, messages: Sequence[Message]) -> set[str]:
        """Return the names of message fields that the template never reads."""
        fields = {key for message in messages for key in message}
        unread = {key for key in fields - _NAMES_ONLY if not self.reads(key)}
        if fields & {*REASONING} and not any(map(self.reads, REASONING)):
            unread.add("reasoning_content")
        return unread

    @cached_property
    def _written_roles(self) -> dict[str, bool]:
        return {}

    def _writes(self, role: str) -> bool:
        """Return whether the template writes a role's messages, by rendering a probe."""
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
    """Return the chat template in `template_file`, or the one beside a `tokenizer.json`.

    Beside the tokenizer, `chat_template.jinja` takes precedence over `chat_template` in
    tokenizer_config.json; if that is a list, the template named "default" is used. Raises DataError
    if there is no usable template.
    """
    config = json_object(tokenizer_file.with_name(CONFIG))
    special = json_object(tokenizer_file.with_name(SPECIAL)) | config
    tokens = {f"{name}_token": text for name in _TOKENS if (text := _text(special, name))}
    file = Path(template_file) if template_file else tokenizer_file.with_name(TEMPLATE)
    if template_file or file.is_file():
        if not file.is_file():
            raise DataError(f"data.chat_template = {template_file!r} is not a file")
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
    """Return a rendered text with its marks removed, and the spans that the marks located."""
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
    """Return the JSON object in a file, or an empty one if the file does not exist.

    Raises DataError for a file that is not a JSON object.
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
    """Return a config's chat template, or "" if it has none; of a list, the one named "default"."""
    if isinstance(value, list):
        named = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
        value = named.get("default")
    return value if isinstance(value, str) else ""
