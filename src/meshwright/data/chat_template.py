"""The template that renders a conversation as text: Jinja as in transformers, with limits.

A template comes with a tokenizer from an untrusted source. It runs in Jinja's immutable sandbox;
here, its loops are counted and its texts measured, because Jinja itself has no limits for these.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshwright.data.conversations import Message
from meshwright.errors import DataError
from meshwright.files import reading, sha256_bytes
from meshwright.parsing import parse_json

TEMPLATE, CONFIG, SPECIAL = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
_MOST_SOURCE: Final = 1 << 18  # characters of a template; known ones have at most some ten thousand
_MOST_TEXT: Final = 1 << 26  # characters of a conversation, and of each text on the way to it
_MOST_TURNS: Final = 10_000_000  # of all loops of a rendering
_MOST_SECONDS: Final = 10.0
# What encloses a marked answer while it is rendered, of the Unicode range that is nobody's; the
# second pair is for conversations that hold the first.
_MARKS: Final = (("\ue0f0", "\ue0f1"), ("\uf8f0", "\uf8f1"))
_TOKENS: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Rendered(NamedTuple):
    """A text, and the character ranges that the template marks as the assistant's."""

    text: str
    marked: tuple[tuple[int, int], ...]


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
        """Identify what the template writes."""
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
    def _compiled(self) -> _Compiled:
        return _Compiled(self)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_compiled"}

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, prompts: bool = False
    ) -> Rendered:
        """Return messages as text; `prompts` appends the prompt for the assistant's answer.

        Raises ValueError if the template refuses them, fails, or exceeds its limits.
        """
        values = json.dumps([messages, tools], ensure_ascii=False)
        for begin, end in _MARKS:
            if begin not in values and end not in values:
                break
        else:
            raise ValueError("it has characters of Unicode's private areas that mark answers here")
        given = {**self.tokens, "messages": list(messages), "tools": tools, "documents": None}
        text = self._compiled.run({**given, "add_generation_prompt": prompts}, (begin, end))
        return _without_marks(text, begin, end)


def load_template(tokenizer_file: Path, given: str | None = None) -> ChatTemplate:
    """Return the template of the files next to a `tokenizer.json`, or of the file `given`.

    `chat_template.jinja` comes before `chat_template` of tokenizer_config.json; of several there,
    the one named "default" is used. Raises DataError if there is no usable one.
    """
    config = _object(tokenizer_file.with_name(CONFIG))
    special = _object(tokenizer_file.with_name(SPECIAL)) | config
    tokens = {f"{name}_token": text for name in _TOKENS if (text := _text(special, name))}
    file = Path(given) if given else tokenizer_file.with_name(TEMPLATE)
    if given or file.is_file():
        if not file.is_file():
            raise DataError(f"data.chat_template = {given!r} is no file")
        with reading(file):
            content, origin = file.read_bytes(), str(file)
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


class _Compiled:
    """A template compiled, with what counts its loops and measures its texts."""

    def __init__(self, template: ChatTemplate) -> None:
        from jinja2 import TemplateError, nodes

        if len(template.source) > _MOST_SOURCE:
            size = f"{len(template.source)} characters, at most {_MOST_SOURCE}"
            raise DataError(f"{template.origin} has {size}")
        self._bounds = _Bounds()
        self._environment = _environment(self._bounds)
        try:
            tree = self._environment.parse(template.source)
            blocks = tree.find_all(nodes.CallBlock)
            self.has_marks = any(
                isinstance(block.call.node, nodes.ExtensionAttribute) for block in blocks
            )
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
            code = self._environment.compile(_measured(tree))
            self._template = self._environment.template_class.from_code(
                self._environment, code, self._environment.make_globals(None)
            )
        except (TemplateError, RecursionError) as error:
            raise DataError(f"{template.origin} is no Jinja template: {error!s:.200}") from error

    def run(self, values: Mapping[str, Any], marks: tuple[str, str]) -> str:
        """Return the text; raises ValueError for any failure."""
        self._bounds.begin(marks)
        parts, length = [], 0
        try:
            for part in self._template.generate(**values):
                length += len(part)
                self._bounds.check(length)
                parts.append(part)
        except MemoryError:
            raise ValueError("the chat template makes a text that does not fit") from None
        except Exception as error:  # a template can raise whatever Python does
            raise ValueError(f"the chat template fails: {error!s:.200}") from error
        return "".join(parts)


class _Bounds:
    """What one rendering has used of its bounds, and the marks that it writes."""

    marks = _MARKS[0]

    def begin(self, marks: tuple[str, str]) -> None:
        self.marks, self._turns, self._ends = marks, 0, time.monotonic() + _MOST_SECONDS

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


def _measured(tree: Any) -> Any:
    """Have the sizes of all joined texts checked: each at most doubles what was checked before."""
    from jinja2 import nodes

    class Measure(_visitor()):  # type: ignore[misc]
        def visit_Concat(self, node: Any) -> Any:
            inside = self.generic_visit(node)
            return nodes.Filter(inside, "measured", [], [], None, None)

    return Measure().visit(tree)


def _visitor() -> Any:
    from jinja2.visitor import NodeTransformer

    return NodeTransformer


def _environment(bounds: _Bounds) -> Any:
    """Return the environment that transformers gives to templates, with bounds.

    transformers/utils/chat_template_utils.py, `_compile_jinja_template`.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            begin, end = bounds.marks
            return f"{begin}{caller()}{end}"

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
            own = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
            text = getattr(own, "__self__", None)
            if isinstance(text, str):
                bounds.check(_size(function.__name__, text, [*args, *kwargs.values()]))
            return bounds.measured(super().call(context, function, *args, **kwargs))

    def to_json(value: Any, indent: Any = None, separators: Any = None, sort_keys: bool = False,
                ensure_ascii: bool = False) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)  # fmt: skip

    def refuse(message: str) -> None:
        raise TemplateError(message)

    found = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    del found.globals["lipsum"]
    found.filters = {name: _checked(name, one, bounds) for name, one in found.filters.items()}
    found.filters |= {"tojson": to_json, "counted": bounds.counted, "measured": bounds.measured}
    found.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return found


def _checked(name: str, function: Any, bounds: _Bounds) -> Any:
    """Return a filter that looks at its arguments first, and at its result."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        # The environment or the context may come before the value that is filtered.
        own = next((at for at, one in enumerate(given) if isinstance(one, str)), len(given))
        text = given[own] if own < len(given) else ""
        bounds.check(_size(name, text, [*given[:own], *given[own + 1 :]]))
        return bounds.measured(function(*args, **kwargs))

    return run


def _size(name: str, text: str, args: Sequence[Any]) -> int:
    """Return at least as many characters as a method or a filter of a text makes of it."""
    texts = [one for one in args if isinstance(one, str)]
    if name in ("format", "format_map") and re.search(r"\d{5}|\*", text):
        raise ValueError(f"the width in the format {text!r:.80}")
    if name == "replace" and len(texts) >= 2:
        return len(text) + text.count(texts[0]) * len(texts[1])
    lists = [one for one in args if isinstance(one, list | tuple)]
    joined = sum(len(part) + len(text) for one in lists for part in one if isinstance(part, str))
    widths = [abs(one) for one in args if isinstance(one, int)]
    return max([joined if name == "join" else 0, *widths])


def _without_marks(text: str, begin: str, end: str) -> Rendered:
    """Take the marks out of a text and return where they stood."""
    parts, spans, length, opened = [], [], 0, -1
    start = 0
    for at, character in enumerate(text):
        if character not in (begin, end):
            continue
        parts.append(text[start:at])
        length += at - start
        start = at + 1
        if character == begin:
            opened = length
        elif length > opened >= 0:
            spans.append((opened, length))
            opened = -1
    return Rendered("".join([*parts, text[start:]]), tuple(spans))


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        with reading(path):
            return dict(parse_json(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is not a JSON object: {error}") from error


def _text(config: Mapping[str, Any], name: str) -> str | None:
    token = config.get(f"{name}_token")
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _stated(value: object) -> str:
    """Return a config's template, the one named "default" of several; empty where it has none."""
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""
