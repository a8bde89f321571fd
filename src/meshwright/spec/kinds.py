"""`Spec`, the base class of config sections, and descriptions of the values that keys accept."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic_core import ErrorDetails

from meshwright.errors import either

# Far above what anybody trains: a program has a row for each layer, microbatch and rank.
LARGEST: Final = 2**31 - 1


class Spec(BaseModel):
    """Base of all specs: frozen, strict types, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )


def as_tuple(value: object) -> object:
    """Convert a list from a TOML or JSON file to a tuple."""
    return tuple(value) if isinstance(value, list) else value


_WORDS: Final = {str: ("a string", "strings"), int: ("an integer", "integers")}
_NUMBER: Final = ("a number", "numbers")
# Of pydantic's errors, besides `..._type`, those that say: a value of another kind.
_KIND_ERRORS: Final = ("int_from_float", "literal_error", "too_long", "too_short")


def is_of_kind(error: ErrorDetails) -> bool:
    """Whether a pydantic error is about a value's type, rather than its size."""
    kind, is_item = error["type"], isinstance(error["loc"][-1], int)
    return kind.endswith("_type") or kind in _KIND_ERRORS or (kind == "missing" and is_item)


def kind_of(annotation: Any) -> str:
    """Describe what a key accepts: "an integer", "true, false or 'auto'", "a list of 2 numbers"."""
    return either(_alternatives(annotation))


def _alternatives(annotation: Any) -> Iterator[str]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for alternative in inner:
            yield from _alternatives(alternative)
    elif origin is Annotated:
        yield from _alternatives(inner[0])
    elif origin is Literal:
        yield from map(shown, inner)
    elif origin is tuple:
        count = "" if inner[-1] is Ellipsis else f"{len(inner)} "
        yield f"a list of {count}{_plural(inner[0])}"
    elif annotation is bool:
        yield from ("true", "false")
    elif is_table(annotation):
        yield "a table"
    elif annotation is not NoneType:
        yield _WORDS.get(annotation, _NUMBER)[0]


def is_table(annotation: Any) -> bool:
    """Whether a key of this type has a table as its value."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def tables_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the spec classes of the tables that a key accepts, directly or in a list."""
    if is_table(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from tables_in(inner)


def _plural(annotation: Any) -> str:
    return "tables" if is_table(annotation) else _WORDS.get(annotation, _NUMBER)[1]


def shown(value: Any) -> str:
    """Format a value as TOML, with strings in single quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {shown(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return repr(value)
