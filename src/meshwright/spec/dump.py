"""Writes a config as TOML; tomllib only reads. Values are scalars, lists and small tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from meshwright.spec.loading import OF_SECTION, Config
from meshwright.spec.resolve import Values

# How the origin of a calibration begins that nobody has named.
MEASURED_HERE: Final = "measured here"
# And those of a microbatch that nobody has given.
FASTEST: Final = "derived: the fastest that fits"
LARGEST: Final = "derived: the usual number of tokens, or as many as fit"


def portable(config: Config) -> Config:
    """Return a config without settings that apply only to this machine."""
    changes: dict[str, Any] = {}
    if config.origins.get("cluster.calibration", "").startswith(MEASURED_HERE):
        changes["cluster"] = config.cluster.model_copy(update={"calibration": None})
    if config.origins.get("layout.microbatch", "").startswith((FASTEST, LARGEST)):
        changes["layout"] = config.layout.model_copy(update={"microbatch": None})
    return config.model_copy(update=changes) if changes else config


def to_toml(config: Config) -> str:
    """Return the config as TOML that `load_config` reads back to an equal one."""
    lines: list[str] = []
    for section, values in config.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [
            f"{key} = {toml_value(value)}"
            for key, value in values.items()
            if value is not None and (section, key) != OF_SECTION
        ]
        lines.append("")
    return "\n".join(lines)


def given_toml(stated: Mapping[str, Values]) -> str:
    """Return the set values of a config as TOML, each with its origin as a comment."""
    lines: list[str] = []
    for section, values in stated.items():
        rows = [(key, value) for key, value in values.items() if value.value is not None]
        if rows:
            lines.append(f"[{section}]")
            lines += [f"{k} = {toml_value(v.value)}  # {_comment(v.origin)}" for k, v in rows]
            lines.append("")
    return "\n".join(lines)


def _comment(text: str) -> str:
    return " ".join(text.split())


def toml_value(value: Any) -> str:
    """Return a scalar, list or small table in TOML."""
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped. TOML has no
        # surrogates, in whose pairs JSON would escape what is not ASCII.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        inner = ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items() if v is not None)
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return repr(value)
