"""`Trainer`: what another training system can do, and its version, as data.

`trainers/*.toml` has a table for each: which layouts it can run, as a union of spaces; what its
files say and what they leave to a script; and as which system of `cost/systems.py` it is priced.
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
    """Layouts that a trainer can run: for each key, the values that it may have.

    A key without values may have any. `why` says of which engine or mode the space is. With
    `even_stages`, every stage has the same number of layers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    why: str
    even_stages: bool = False
    values: dict[str, tuple[int | bool | str, ...]] = {}

    def misfits(self, layout: Layout, layers: int) -> list[str]:
        """Return the keys of a layout that have no value of this space."""
        keys = [
            key
            for key, legal in self.values.items()
            if not (key in _IDLE and getattr(layout, _IDLE[key]) == 1)
            and not _among(getattr(layout, key), legal)
        ]
        return [*keys, *(["pp"] if self.even_stages and layers % layout.stages else [])]


class Trainer(BaseModel):
    """A training system that can be planned for, from its table.

    `version` is that of `package` whose parser and code the facts are from. `file` is what a plan
    is written as, in `suffix` form. `priced_as` names a system of `cost/systems.py`; `priced_why`
    says why where it is another one. `says` are the config keys beside the layout that the file
    can say, `scripted` those that the user's script says; `beside` layout keys that it says, and
    how.
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
        """Return why the trainer cannot run a layout, with the nearest space; None where it can."""
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
        """Return what to search: for each space, the values that each layout key may have.

        `fixed` are keys that the user gave. A space that does not allow one of them is left out.
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
    """Return the trainer with a name of `TRAINERS`."""
    file = files(__package__) / "trainers" / f"{name.replace('-', '_')}.toml"
    return Trainer.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
