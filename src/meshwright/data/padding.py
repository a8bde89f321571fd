"""Nulls that a table adds to its rows: Arrow gives each object the fields of all other rows' ones.

Such a null looks like one that was written. A field of a message or of a tool's description that
is null says nothing, and is left out. An argument of a call may be null on purpose: it is kept
where the row's own tools require it, left out where they don't have it, and else refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.errors import refusal
from meshwright.parsing import parse_json

_HINT: Final = "Store arguments as texts of JSON, or rows as jsonl, which keep nulls as written"


def without_padding(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table without the nulls of other rows.

    Raises ValueError for an argument that may be null on purpose.
    """
    schemas = _schemas(_dropped(decoded_tools(row.get("tools"))))
    return {key: _without(value, schemas) for key, value in row.items()}


def decoded_tools(value: Any) -> Any:
    """Return a row's tools; some data sets have them, or each of them, as a text of JSON."""
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
    """Return arguments without those that a tool does not have."""
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
    """Return the parameters of each tool by its name."""
    schemas = {}
    for tool in tools if isinstance(tools, list) else ():
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get("name"), str):
            schemas[inner["name"]] = inner.get("parameters")
    return schemas


def _dropped(value: Any) -> Any:
    """Return a value without the nulls of its objects."""
    if isinstance(value, dict):
        return {key: _dropped(part) for key, part in value.items() if part is not None}
    return [_dropped(part) for part in value] if isinstance(value, list) else value
