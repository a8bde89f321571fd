"""The table of mutants: what each changes, what it stands for and what must catch it."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

TABLE: Final = Path(__file__).with_name("mutants.toml")
ROOT: Final = Path(__file__).parents[2]
SRC: Final = ROOT / "src"


class TableError(Exception):
    """The table has an entry that cannot be used; the message names it."""


@dataclass(frozen=True)
class Mutant:
    """A fault of one line: `find` of a file under `src/meshwright` becomes `put`.

    `find` occurs there once, or once after the text `after`. `killers` are names of commands that
    must each fail with it; `what` says what goes wrong.
    """

    name: str
    file: str
    find: str
    put: str
    what: str
    killers: Sequence[str]
    after: str = ""

    def applied(self, text: str) -> str:
        """Return the text of the file with the fault; raises `TableError` where it doesn't fit."""
        before, anchor, rest = "", self.after, text
        if anchor:
            if text.count(anchor) != 1:
                raise self._error(f"`after` occurs {text.count(anchor)} times in {self.file}")
            before, _, rest = text.partition(anchor)
        if "\n" in self.find + self.put or self.find == self.put:
            raise self._error("`find` and `put` are of one line, and differ")
        if not self.find or (not anchor and rest.count(self.find) != 1) or self.find not in rest:
            raise self._error(f"`find` occurs {rest.count(self.find)} times in {self.file}")
        changed = before + anchor + rest.replace(self.find, self.put, 1)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise self._error(f"what it makes of {self.file} is no Python: {error}") from error
        return changed

    def _error(self, text: str) -> TableError:
        return TableError(f"mutant {self.name}: {text}")


@dataclass(frozen=True)
class Table:
    """Mutants by name, and the commands that catch them by name."""

    mutants: Mapping[str, Mutant]
    killers: Mapping[str, str]

    @classmethod
    def read(cls, path: Path = TABLE) -> Table:
        """Read a table; raises `TableError` for an entry that cannot be used."""
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        killers: dict[str, str] = found.get("killers", {})
        mutants: dict[str, Mutant] = {}
        for values in found.get("mutant", []):
            one = _mutant(values)
            if one.name in mutants:
                raise TableError(f"mutant {one.name}: there are two")
            if not one.killers or not set(one.killers) <= set(killers):
                raise TableError(f"mutant {one.name}: killers {one.killers} are not all known")
            mutants[one.name] = one
        return cls(mutants, killers)


def _mutant(values: Mapping[str, Any]) -> Mutant:
    try:
        return Mutant(**values)
    except TypeError as error:  # a field that is missing, or unknown
        raise TableError(f"mutant {values.get('name', 'without a name')}: {error}") from error


def copy_of_source(into: Path, source: Path = SRC) -> Path:
    """Return a copy of the source under a folder, its files linked to those of the original."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:  # another file system
            shutil.copy2(one, other)

    shutil.copytree(source / "meshwright", into / "meshwright", copy_function=link)
    return into


def put_into(mutant: Mutant, tree: Path) -> None:
    """Change the copied file; the original, whose link this was, stays as it is."""
    path = tree / "meshwright" / mutant.file
    if not path.is_file():
        raise TableError(f"mutant {mutant.name}: there is no {mutant.file}")
    text = mutant.applied(path.read_text(encoding="utf-8"))
    path.unlink()
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
