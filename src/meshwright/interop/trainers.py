"""`Trainer`: the layouts that another training system can run, and its version, as data.

`trainers/*.toml` has a table for each: which layouts it can run, as a union of spaces; what its
files express and what they leave to a script; and which system of `cost/systems.py` predicts its
time and memory.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from meshwright.interop.flat import System
from meshwright.layout import Layout

TRAINERS: Final[tuple[System, ...]] = (
    *("accelerate", "axolotl", "deepspeed", "megatron"),
    *("ms-swift", "nemo", "torchtitan", "transformers"),
)
# Keys whose value does not matter where a degree is 1.
_IDLE: Final[Mapping[str, str]] = {"sp": "tp", "cp_kind": "cp", "schedule": "pp"}


class Space(BaseModel):
    """A set of layouts that a trainer can run: the allowed values of each layout key.

    A key without values may have any. `why` names the engine or mode to which this applies. With
    `even_stages`, all stages must have the same number of layers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    why: str
    even_stages: bool = False
    values: dict[str, tuple[int | bool | str, ...]] = {}

    def misfits(self, layout: Layout, layers: int) -> list[str]:
        """Return the keys of a layout whose values this space does not allow.

        `layers` is the model's number of layers.
        """
        keys = [
            key
            for key, legal in self.values.items()
            if not (key in _IDLE and getattr(layout, _IDLE[key]) == 1)
            and not _among(getattr(layout, key), legal)
        ]
        return [*keys, *(["pp"] if self.even_stages and layers % layout.stages else [])]


class Trainer(BaseModel):
    """A training system for which layouts can be planned, from its table.

    `version` is the version of `package` that the table describes. A plan is written as `file`, in
    the format of `suffix`. `priced_as` names a system of `cost/systems.py`; `priced_why` gives the
    reason if it is another system. `says` are config keys besides the layout that the file can
    express, `scripted` those that are set in the user's script; `beside` maps layout keys that are
    set outside the file to how.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: System
    package: str
    version: str
    file: str
    suffix: str
    priced_as: str
    priced_why: str = ""
    says: tuple[str, ...]
    scripted: tuple[str, ...] = ()
    beside: dict[str, str] = {}
    command: str
    spaces: tuple[Space, ...]

    def refusal(self, layout: Layout, layers: int) -> str | None:
        """Return why the trainer cannot run a layout, by the nearest space; None if it can."""
        misfits = [(space, space.misfits(layout, layers)) for space in self.spaces]
        space, keys = min(misfits, key=lambda pair: len(pair[1]))
        if not keys:
            return None
        mismatches = []
        for key in keys:
            legal = space.values.get(key)
            if legal is None:
                mismatches.append(f"{layers} layers in {layout.stages} equal stages")
            else:
                values = ", ".join(_word(value) for value in legal)
                mismatches.append(f"layout.{key} = {_word(getattr(layout, key))} (it has {values})")
        return f"{self.name} {self.version} cannot do {'; '.join(mismatches)} with {space.why}"

    def pins(self, layers: int, fixed: Mapping[str, object]) -> list[dict[str, object]]:
        """Return, for each space, the values of layout keys to search over.

        `fixed` are the keys that the user set; a space that does not allow one of them is left out.
        """
        searches = []
        for space in self.spaces:
            allowed: dict[str, object] = {
                key: frozenset(legal) for key, legal in space.values.items() if key != "sp"
            }
            if space.even_stages and "pp" not in allowed:
                allowed["pp"] = frozenset(n for n in range(1, layers + 1) if layers % n == 0)
            sp = space.values.get("sp", (False, True))
            if len(sp) == 1:
                allowed["sp"] = sp[0]
            if all(_fits(allowed[key], value) for key, value in fixed.items() if key in allowed):
                searches.append({**allowed, **fixed})
        return searches


def _among(value: Any, legal: Sequence[int | bool | str]) -> bool:
    return any(value == choice and type(value) is type(choice) for choice in legal)


def _fits(allowed: object, value: object) -> bool:
    return value in allowed if isinstance(allowed, frozenset) else value == allowed


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@lru_cache(maxsize=len(TRAINERS))
def trainer_named(name: str) -> Trainer:
    """Return the trainer with one of the names in `TRAINERS`."""
    file = files(__package__) / "trainers" / f"{name.replace('-', '_')}.toml"
    return Trainer.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
