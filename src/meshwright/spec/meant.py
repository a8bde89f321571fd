"""`meant`: the nearest legal values to one that a key refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from meshwright.spec.kinds import kind_of, shown

# What is set by another key, or by another value of the same.
ELSEWHERE: Final[Mapping[tuple[str, object], str]] = {
    ("train.precision", "fp8"): "train.fp8=true beside train.precision=bf16",
    ("train.precision", "float8"): "train.fp8=true beside train.precision=bf16",
    ("train.precision", "bfloat16"): "train.precision=bf16",
    ("train.precision", "float16"): "train.precision=fp16",
    ("train.precision", "float32"): "train.precision=fp32",
}
_WITH_UNIT: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmM])")
_GROUPED: Final = re.compile(r"-?\d{1,3}(?:[,_' ]\d{3})+")
_NUMERALS: Final = (
    *("zero", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)
_SWITCHES: Final = {
    **dict.fromkeys(("1", "yes", "on", "y", "t"), "true"),
    **dict.fromkeys(("0", "no", "off", "n", "f"), "false"),
}


def meant(name: str, value: Any, field: FieldInfo) -> list[str]:
    """Return what a value of the wrong kind was probably meant to be, as overrides."""
    text = str(value).strip()
    if (name, value if isinstance(value, str) else "") in ELSEWHERE:
        return [ELSEWHERE[name, value]]
    kinds = kind_of(field.annotation)
    if kinds.startswith("true"):
        switch = _SWITCHES.get(text.lower())
        return [f"{name}={switch}"] if switch else []
    if ("integer" not in kinds and "number" not in kinds) or "list" in kinds:
        return []
    numbers = [n for n in _numbers(text, "integer" in kinds) if _accepts(field, n)]
    return [f"{name}={n}" for n in numbers] or _default(name, field)


def within(name: str, error: ErrorDetails, field: FieldInfo) -> list[str]:
    """Return the nearest value to a number beyond a bound of its key, as an override."""
    bounds: Mapping[str, Any] = error.get("ctx", {})
    is_integer = "integer" in kind_of(field.annotation)
    for bound, step in (("ge", 0), ("le", 0), ("gt", 1), ("lt", -1)):
        if bound in bounds and (is_integer or not step):
            return [f"{name}={bounds[bound] + step}"]
    return _default(name, field)


def _numbers(text: str, is_integer: bool) -> list[int | float]:
    """Return the numbers that a text may stand for: `1,000`, `128k`, `1e3`, `"100"`, `six`."""
    if unit := _WITH_UNIT.fullmatch(text):
        powers = (1024, 1000) if unit[2] in "kK" else (1024**2, 1000**2)
        return [round(float(unit[1]) * power) for power in powers]
    if text.lower() in _NUMERALS:
        return [_NUMERALS.index(text.lower())]
    plain = re.sub("[,_' ]", "", text) if _GROUPED.fullmatch(text) else text
    try:
        number = float(plain)
    except ValueError:
        return []
    if not math.isfinite(number):
        return []
    if number.is_integer():
        return [int(number)]
    return [math.floor(number), math.ceil(number)] if is_integer else [number]


def _accepts(field: FieldInfo, value: float) -> bool:
    """Whether a value of a key's kind is within its bounds."""
    try:
        # What it accepts is known when it runs, which no checker of types can know.
        accepted: Any = Annotated[field.annotation, field]
        TypeAdapter[Any](accepted).validate_python(value)
    except ValidationError:
        return False
    return True


def _default(name: str, field: FieldInfo) -> list[str]:
    """Return the default of a key that has a number as default."""
    default = field.default
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    return [f"{name}={shown(default)}, its default"] if is_number else []
