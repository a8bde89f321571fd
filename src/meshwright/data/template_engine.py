"""The Jinja engine of chat templates: its limits, and marks of which message wrote which text.

A template comes with a tokenizer from an untrusted source. It runs in Jinja's immutable sandbox;
here, its loops are counted and its texts measured, because Jinja itself has no limits for these.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, wraps
from itertools import count
from typing import Any, Final, NamedTuple

from meshwright.errors import DataError

_MOST_SOURCE: Final = 1 << 18  # characters of a template; known ones have at most some ten thousand
_MOST_TEXT: Final = 1 << 26  # characters of a conversation, and of each text on the way to it
_MOST_TURNS: Final = 10_000_000  # of all loops of a rendering
_MOST_SECONDS: Final = 10.0


class TemplateMarks(NamedTuple):
    """Characters that a template does not write.

    `begin` and `end` enclose an answer that the template marks; `turn` and `turn_end` enclose the
    number of a loop, and of the message that the loop is at.
    """

    begin: str
    end: str
    turn: str
    turn_end: str


# Of the Unicode ranges that are nobody's; the second ones are for conversations with the first.
MARKS: Final = (
    TemplateMarks(*"\ue0f0\ue0f1\ue0f2\ue0f3"),
    TemplateMarks(*"\uf8f0\uf8f1\uf8f2\uf8f3"),
)


class Compiled:
    """A compiled template that counts its loops and measures its texts.

    `has_marks`: it encloses answers in `{% generation %}`. `names` are all names and texts in its
    source, among them those of every field that it reads. Raises DataError with `origin` where it
    is no template.
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
        """Return the text; with `messages`, with marks where a loop gets to each of them.

        Raises ValueError for any failure.
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
        return DataError(f"{self._origin} is no Jinja template: {error!s:.200}")


class _Bounds:
    """The limits of one rendering, with how much of them is used, and the marks that it writes."""

    marks = MARKS[0]

    def begin(self, marks: TemplateMarks, messages: Sequence[Any]) -> None:
        self.marks, self._turns, self._ends = marks, 0, time.monotonic() + _MOST_SECONDS
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._begun: set[int] = set()  # loops that have come to a message

    def turn(self, value: Any, loop: int) -> str:
        """Return the mark of a loop's turn, where it is at a message."""
        number = self._numbers.get(id(value))
        if number is None:
            return ""
        self._begun.add(loop)
        return f"{self.marks.turn}{loop} {number}{self.marks.turn_end}"

    def loop_end(self, loop: int) -> str:
        """Return the mark after a loop over messages."""
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
    """Write a mark at each turn of a loop over messages, and one after each loop."""
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
    """Check the length of all joined texts: each at most doubles what was checked before."""
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
    """Return the extension of `{% generation %}`, whose text becomes the answer between marks."""
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
    """Return the environment that transformers gives to templates, with bounds.

    transformers/utils/chat_template_utils.py, `_compile_jinja_template`.
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
    # Of a context: what has none is computed once, when the template is compiled.
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
    """Return a bound on how many characters a method or a filter makes of a text."""
    texts = [arg for arg in args if isinstance(arg, str)]
    if name in ("format", "format_map") and re.search(r"\d{5}|\*", text):
        raise ValueError(f"the width in the format {text!r:.80}")
    if name == "replace" and len(texts) >= 2:
        return len(text) + text.count(texts[0]) * len(texts[1])
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    joined = sum(len(part) + len(text) for arg in lists for part in arg if isinstance(part, str))
    widths = [abs(arg) for arg in args if isinstance(arg, int)]
    return max([joined if name == "join" else 0, *widths])
