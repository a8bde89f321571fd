"""`Calibration`: the measured constants of the cost model, read from a data file. No number in the
code is fitted."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.files import read_text
from meshwright.parsing import parse_toml
from meshwright.spec.model import OF_PADDING, ModelSpec

# Constants with such a part in their name are divided by, but for dims at half the rate of matmuls:
# these are 0 where the rate does not depend on the size, as in emulated bf16.
_RATES: Final = frozenset(
    (
        "attention",
        "host_bandwidth",
        "idle",
        "measured",
        "memory",
        "optimizer",
        "products",
        "rate",
        "share",
    )
)
# What stands in for a device or a system that has not been measured.
ANY = "any"
# The share of the time in which ranks have their cores, below which a machine is busy otherwise.
QUIET: Final = 0.8
# Names the calibration that comes with the package, where a file could be named.
SHIPPED: Final = "shipped"


@dataclass(frozen=True)
class Calibration:
    """Measured constants by name, such as "h100.overlap", and where they come from.

    The first part of a name is a kind of device, a training system, or "any". A kind such as
    "h100-500w" falls back to "h100". `blocks` identifies the model whose blocks were measured, see
    `blocks_of`. `had_core` is the share of time in which the measuring ranks had a CPU core.
    """

    constants: Mapping[str, float]
    date: str = ""
    source: str = ""
    blocks: str = ""
    had_core: float = 1.0

    @cached_property
    def _found(self) -> dict[tuple[str, ...], float]:
        """The cache of `find`, which a search calls a hundred thousand times."""
        return {}

    @property
    def is_quiet(self) -> bool:
        """Whether the machine had no other load to speak of while it was measured."""
        return self.had_core >= QUIET

    def of(self, model: ModelSpec, seq_len: int) -> Calibration:
        """Return the calibration without constants that were measured on blocks of another model or
        sequence length.

        If the calibration does not say whose blocks were measured, returns all of it.
        """
        if self.blocks in ("", blocks_of(model, seq_len)):
            return self
        constants = {name: self.constants[name] for name in self.constants if not _of_blocks(name)}
        return replace(self, constants=constants)

    def find(self, constant: str, *kinds: str) -> float:
        """Return the value of a constant for the first of `kinds` (devices, systems) that has it,
        otherwise for "any".

        If none has it, looks for the name without its last part: a value for "moves" also applies
        to "moves.fp32". Raises `KeyError` if that fails, too.
        """
        key = (constant, *kinds)
        if key not in self._found:
            self._found[key] = self._find(constant, *kinds)
        return self._found[key]

    def _find(self, constant: str, *kinds: str) -> float:
        names = constant.split(".")
        everywhere = (*kinds, *(kind.partition("-")[0] for kind in kinds), ANY)
        for length in range(len(names), 0, -1):
            name = ".".join(names[:length])
            for kind in everywhere:
                value = self.constants.get(f"{kind}.{name}")
                if value is not None:
                    return value
        raise KeyError(f"no calibration of {constant} for {' or '.join(kinds)}")


def parse_calibration(text: str) -> Calibration:
    """Return the calibration in a TOML text: tables of constants by kind, and the table `[about]`.

    Raises `ValueError` if the text is anything else.
    """
    content = parse_toml(text)
    for kind, table in content.items():
        if not isinstance(table, dict):
            raise ValueError(f"{kind} = {table!r} is in no table of a kind, such as [cpu]")
    about = content.pop("about", {})
    said = [about.get(key, "") for key in ("date", "source", "blocks")]
    if not all(isinstance(entry, str) for entry in said):
        raise ValueError("[about] must have strings as date, source and blocks")
    had_core = about.get("had_core", 1.0)
    if isinstance(had_core, bool) or not isinstance(had_core, int | float):
        raise ValueError(f"about.had_core = {had_core!r} must be a number")
    if not 0 < had_core <= 1.5:  # clocks differ a little
        raise ValueError(f"about.had_core = {had_core} must be above 0 and about 1 at most")
    date, source, blocks = said
    return Calibration(dict(_flat(content)), date, source, blocks, had_core)


def blocks_of(model: ModelSpec, seq_len: int) -> str:
    """Return a hash of the model's fields that determine the speed of one block, and of the
    sequence length.

    The number of layers and the vocabulary are left out.
    """
    excluded = {"n_layers", "vocab_size", OF_PADDING, "tie_embeddings"}
    fields = model.model_dump(mode="json", exclude=excluded)
    return hashlib.sha256(json.dumps([fields, seq_len], sort_keys=True).encode()).hexdigest()[:16]


def _flat(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    constants = []
    for key, value in content.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            constants += _flat(value, name)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} = {value!r} must be a number")
        else:
            constants.append((name, _checked(name, float(value))))
    return constants


def _checked(name: str, value: float) -> float:
    """Return the value of a constant; raises `ValueError` if it is infinite, negative, or a rate of
    0."""
    parts = name.split(".")
    is_rate = not _RATES.isdisjoint(parts) and "half" not in parts
    if not math.isfinite(value) or value < 0 or (is_rate and value == 0):
        rule = "finite and above 0" if is_rate else "finite and not negative"
        raise ValueError(f"{name} = {value} must be {rule}")
    return value


@cache
def shipped_calibration() -> Calibration:
    """Return the package's constants of devices, kernels and links, by which plans are priced.

    Each call reads `calibration.toml` again.
    """
    text = resources.files("meshwright.cost").joinpath("calibration.toml").read_text("utf-8")
    return parse_calibration(text)


def read_calibration(path: Path) -> Calibration:
    """Return the calibration in a file, completed with shipped constants; `ConfigError` if it
    cannot be read."""
    try:
        calibration = parse_calibration(read_text(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"calibration {path} cannot be read: {reason}") from None
    return over_shipped(calibration)


def over_shipped(calibration: Calibration) -> Calibration:
    """Return the calibration with the shipped value of each constant that it lacks."""
    known, shipped = calibration.constants, dict(shipped_calibration().constants)
    for kind in {name.split(".")[0] for name in known if ".inner." in name}:
        # Where links were measured and no channels, there are none.
        shipped = {
            name: shipped[name] for name in shipped if not name.startswith(f"{kind}.channel.")
        }
    # What is shipped of a system on a kind of device comes before that kind's: so does its own.
    replaced = {name for name in shipped if name.partition(".")[2] in known}
    shipped = {name: shipped[name] for name in shipped if name not in replaced}
    return replace(calibration, constants={**shipped, **known})


def calibration_named(name: str | None) -> Calibration:
    """Return the calibration of `cluster.calibration`: a path, or "shipped" or None for the shipped
    one.

    Raises `ConfigError` if the file cannot be read.
    """
    return shipped_calibration() if name in (None, SHIPPED) else read_calibration(Path(name))


def _of_blocks(name: str) -> bool:
    return name.split(".")[1] in ("compile", "blocks")


def as_toml(
    constants: Mapping[str, Mapping[str, float]],
    date: str,
    source: str,
    blocks: str = "",
    had_core: float = 1.0,
) -> str:
    """Return constants, by kind and name, as a TOML text that `parse_calibration` reads."""
    lines = ["[about]", f"date = {json.dumps(date)}", f"source = {json.dumps(source)}"]
    lines += [f"blocks = {json.dumps(blocks)}"] if blocks else []
    lines += [f"had_core = {had_core:.3g}"] if had_core < 1 else []
    for kind, values in constants.items():
        lines += ["", f"[{kind}]"]
        # A name may be the beginning of another: quoted, it is a key of its own.
        lines += [f"{json.dumps(name)} = {value:.6g}" for name, value in values.items()]
    return "\n".join(lines) + "\n"
