"""The devices and links that a config may name, as the rows of `catalogue.toml`.

`cost.catalogue` converts them for pricing.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

from meshwright.errors import ConfigError, nearest, refusal

# Names the machine at hand instead of a device.
LOCAL = "local"

# Names that people type, each of the usual one of several devices.
_SHORT: Final[Mapping[str, str]] = {
    "v100": "v100-32gb",
    "a100": "a100-80gb",
    "h100": "h100-sxm",
    "gh200": "gh200-96gb",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "rtx6000": "rtx6000-ada",
    "mi250": "mi250x",
    "mi300": "mi300x",
}

Rows = Mapping[str, Mapping[str, Any]]


@cache
def catalogue_rows() -> Mapping[str, Rows]:
    """Return the rows by name, of `devices` and of `links`."""
    text = resources.files("meshwright.spec").joinpath("catalogue.toml").read_text("utf-8")
    return tomllib.loads(text)


def full_device_name(name: object) -> object:
    """Return the catalogue's name of a device for a short one, as `h100`, `RTX 4090` or 4090.

    Anything else is returned as it is.
    """
    word = re.sub(r"[\s_]+", "-", str(name).strip().lower()) if isinstance(name, str | int) else ""
    known = catalogue_rows()["devices"]
    for candidate in (word, _SHORT.get(word, ""), word.replace("-", "")):
        if candidate in known:
            return candidate
    return name


def check_device(name: str, where: str = "") -> None:
    """Raise `ConfigError` with the nearest names for a device that the catalogue lacks.

    `where` says where the name was written, in brackets after a space.
    """
    devices = catalogue_rows()["devices"]
    if name not in devices:
        rule = f"cluster.preset = {name!r}{where} is not known"
        raise ConfigError(refusal(rule, legal=_nearest(name, (LOCAL, *devices))))


def check_link(name: str, where: str = "") -> None:
    """Raise `ConfigError` as `check_device` does, for a link."""
    links = catalogue_rows()["links"]
    if name not in links:
        rule = f"cluster.links{where} has {name!r}, which is not known"
        raise ConfigError(refusal(rule, legal=_nearest(name, links)))


def _nearest(name: str, known: Collection[str]) -> list[str]:
    return nearest(name, known, 3) or sorted(known)
