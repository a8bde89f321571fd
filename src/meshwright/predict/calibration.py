"""`Calibration`: the measured efficiencies, from a data file; no other number here is fitted."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError

# What stands in for a device or a stack that has not been measured.
ANY = "any"


@dataclass(frozen=True)
class Calibration:
    """Constants by name, `KIND.what`, and where they come from.

    KIND is the kind of a device, the name of a stack, or "any". A kind such as "h100-500w" stands
    back to "h100".
    """

    constants: Mapping[str, float]
    date: str = ""
    source: str = ""

    def find(self, what: str, *kinds: str) -> float:
        """Return a constant of the first of the kinds that has it, else that of any.

        Raises `KeyError` where no kind has it.
        """
        for kind in (*kinds, *(kind.partition("-")[0] for kind in kinds), ANY):
            found = self.constants.get(f"{kind}.{what}")
            if found is not None:
                return found
        raise KeyError(f"no calibration of {what} for {' or '.join(kinds)}")


def parse_calibration(text: str) -> Calibration:
    """Return the calibration of a TOML text: tables of kinds with constants, and `[about]`."""
    content = tomllib.loads(text)
    about = content.pop("about", {})
    return Calibration(dict(_flat(content)), about.get("date", ""), about.get("source", ""))


def _flat(content: Mapping[str, Any], at: str = "") -> list[tuple[str, float]]:
    found = []
    for key, value in content.items():
        name = f"{at}.{key}" if at else key
        found += _flat(value, name) if isinstance(value, dict) else [(name, float(value))]
    return found


@cache
def shipped_calibration() -> Calibration:
    """Return the calibration that comes with the package."""
    text = resources.files("meshwright.predict").joinpath("calibration.toml").read_text("utf-8")
    return parse_calibration(text)


def read_calibration(path: Path) -> Calibration:
    """Return a calibration of one's own on top of the shipped one; raises `ConfigError`."""
    try:
        own = parse_calibration(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"calibration {path} cannot be read: {error}") from None
    shipped = shipped_calibration().constants
    return Calibration({**shipped, **own.constants}, own.date, own.source)
