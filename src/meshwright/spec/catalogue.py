"""The devices and links that a config may name, as the rows of `catalogue.toml`.

`cost.catalogue` converts them for pricing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from typing import Any

from meshwright.errors import ConfigError, nearest, refusal

# Names the machine at hand instead of a device.
LOCAL = "local"

Rows = Mapping[str, Mapping[str, Any]]


@cache
def catalogue_rows() -> Mapping[str, Rows]:
    """Return the rows by name, of `devices` and of `links`."""
    text = resources.files("meshwright.spec").joinpath("catalogue.toml").read_text("utf-8")
    return tomllib.loads(text)


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
