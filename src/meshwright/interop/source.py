"""`ImportSource`: the keys of a file during an import, each with its verdict once it has one.

Verdicts are honoured (same meaning), translated, ignored (no effect), unsupported and
contradictory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from pydantic import ValidationError

from meshwright.errors import nearest
from meshwright.interop.import_report import Filled, KeyReport, Verdict
from meshwright.interop.table import KeyRow, Table
from meshwright.parsing import MAX_DIGITS
from meshwright.spec.loading import SECTIONS
from meshwright.spec.training import Zero

AUTO = "auto"
# Keys whose default depends on others.
_DERIVED = ("optimizer.lr", "optimizer.warmup_steps", "train.batch", "train.precision")
_TOO_LARGE = 10**MAX_DIGITS


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < _TOO_LARGE  # neither infinite nor NaN


@dataclass(frozen=True)
class ImportSettings:
    """The base config, the overrides and the devices of an import.

    `base` has the values of the base config and the overrides, by `section.key`; `given` names
    those that were overridden, which take precedence over the file. `devices` is the number of
    ranks; `is_fixed` is whether the user gave it.
    """

    base: Mapping[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    devices: int = 1
    is_fixed: bool = False


class ImportSource:
    """The flat keys of the imported files, and their verdicts so far.

    A key gets its verdict once; keys without one at the end get that of their row in the table.
    """

    def __init__(self, values: Mapping[str, Any], tables: Sequence[Table], setting: ImportSettings):
        self.values = dict(values)
        self.tables = list(tables)
        self.setting = setting
        self.entries: dict[str, KeyReport] = {}
        self.filled: list[Filled] = []

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value, or the default if it is absent, null, "auto" or switched off."""
        value = None if self._off(key) is not None else self.values.get(key)
        return default if value is None or value == AUTO else value

    def whole(self, key: str) -> int | None:
        """Return an integer of at least 1, or None if the key is absent, null or "auto".

        Other values are reported as a contradiction, and give None.
        """
        value = self.get(key)
        if value is None:
            return None
        if not _is_number(value) or value != int(value):
            self.contradict([key], f"{value!r} must be a whole number")
            return None
        if value < 1:
            self.contradict([key], f"{value!r} must be at least 1")
            return None
        return int(value)

    def number(self, key: str, default: float) -> float:
        """Return a key's number, or the default if it is absent; other values are reported."""
        value = self.get(key, default)
        if not _is_number(value):
            self.contradict([key], f"{value!r} must be a number")
            return default
        return float(value)

    def target(self, key: str) -> Any:
        """Return the value of a Meshwright key so far, or None.

        In order of precedence: an override, the imported files, the base config, filled-in
        defaults.
        """
        if key in self.setting.given:
            return self.setting.base[key]
        for entry in self.entries.values():
            if key in entry.to:
                return entry.to[key]
        filled = next((f for f in self.filled if f.key == key), None)
        if key in self.setting.base and (filled is None or filled.is_default):
            return self.setting.base[key]
        return None if filled is None else filled.value

    def count_devices(self, devices: int) -> None:
        """Set the number of ranks to what the file's own launcher starts."""
        self.setting = replace(self.setting, devices=devices, is_fixed=True)

    def honour(self, key: str, to: Mapping[str, Any] | None = None, note: str = "") -> None:
        """Set a key's verdict to honoured: its value means the same in Meshwright, as `to`."""
        self._take(key, "honoured", to, note)

    def translate(self, key: str, to: Mapping[str, Any], note: str = "") -> None:
        """Set a key's verdict to translated: `to` expresses it by other keys or values."""
        self._take(key, "translated", to, note)

    def ignore(self, key: str, reason: str) -> None:
        """Set a key's verdict to ignored: it has no effect in Meshwright."""
        self._take(key, "ignored", None, reason)

    def refuse(
        self,
        key: str,
        reason: str,
        *,
        settled_by: Sequence[str] = (),
        default: Any = None,
        is_final: bool = False,
    ) -> None:
        """Set a key's verdict to unsupported, so that the import is refused by default.

        Without this key, another model would be trained, or in another way. With a `default` of the
        other system, this applies as well if the file lacks the key. The user can accept the loss
        with `--accept`, unless it is final, or by setting a Meshwright key in `settled_by`.
        """
        is_default = key not in self.values
        if is_default and default is None:
            return
        value = default if is_default else self.values[key]
        self.entries.setdefault(
            key,
            KeyReport(
                key,
                value,
                "unsupported",
                {},
                reason,
                True,
                tuple(settled_by),
                is_default=is_default,
                is_final=is_final,
            ),
        )

    def miss(self, key: str, reason: str) -> None:
        """Set a key's verdict to unsupported, without effect on what is trained."""
        self._take(key, "unsupported", None, reason)

    def contradict(self, keys: Sequence[str], reason: str, settled_by: Sequence[str] = ()) -> None:
        """Set the verdict of keys to contradictory, replacing earlier verdicts."""
        present = [key for key in keys if key in self.values] or list(keys)[:1]
        for key in present:
            value = self.values.get(key)
            self.entries[key] = KeyReport(
                key,
                value,
                "contradictory",
                {},
                reason,
                settled_by=tuple(settled_by),
                is_default=key not in self.values,
            )

    def fill(self, key: str, value: Any, reason: str) -> None:
        """Set a Meshwright key to a default that the file implies; the base config wins."""
        self.filled.append(Filled(key, value, reason))

    def imply(self, key: str, value: Any, reason: str) -> None:
        """Set a Meshwright key to what the file's numbers imply, replacing the base config's."""
        self.filled.append(Filled(key, value, reason, is_default=False))

    def take(self, key: str) -> None:
        """Give a key the verdict of its row in the table now, for rules that need its value."""
        if key in self.values and key not in self.entries:
            self._classify(key, self.values[key])

    def finish(self) -> None:
        """Give every key without a verdict that of its row in the table, and fill in defaults."""
        for key in self.values:
            self.take(key)
        for table, key, row in self._rows():
            # "auto" is what the base or our own default has, as a trainer's own arguments fill it.
            silent = row.default is not None and self.values.get(key) is None
            with_it = not row.given_with or row.given_with in self.values
            is_on = self._off(key) is None
            if silent and with_it and is_on and row.to not in self._set():
                self.fill(row.to, row.default, f"{table.name}'s default of {key}")
        self._compare()

    def _compare(self) -> None:
        """Report keys of the file that set one Meshwright key to different values."""
        setters: dict[str, list[KeyReport]] = {}
        for entry in self.entries.values():
            for name in entry.to:
                setters.setdefault(name, []).append(entry)
        for name, entries in setters.items():
            if any(not _equal(entry.to[name], entries[0].to[name]) for entry in entries[1:]):
                claims = ", ".join(f"{entry.key} gives {entry.to[name]!r}" for entry in entries)
                reason = f"{name} cannot be both: {claims}; keep one"
                self.contradict([entry.key for entry in entries], reason, [name])

    def _rows(self) -> list[tuple[Table, str, KeyRow]]:
        """Return all rows as (table, key, row); for a key in two tables, that of the first."""
        rows: dict[str, tuple[Table, str, KeyRow]] = {}
        for table in self.tables:
            for key, row in table.rows.items():
                rows.setdefault(key, (table, key, row))
        return list(rows.values())

    def _set(self) -> set[str]:
        """Return the Meshwright keys that are set so far."""
        of_entries = {key for entry in self.entries.values() for key in entry.to}
        return of_entries | {filled.key for filled in self.filled}

    def _classify(self, key: str, value: Any) -> None:
        switch = self._off(key)
        if switch is not None:
            self.ignore(key, f"{switch} is not on")
            return
        rows = [row for table in self.tables if (row := table.find(key)) is not None]
        if not rows:
            self._unknown(key, value)
            return
        row = rows[0]
        is_switch = key.endswith(".enabled")
        if is_switch and not (value is None or value == AUTO or isinstance(value, bool)):
            self.contradict([key], f"{value!r} must be true or false")
        elif value is False and is_switch:
            self.honour(key, note="off")
        elif value is None:
            self.ignore(key, "not set")
        elif value == AUTO and (row.to or row.by_rule):
            self.honour(key, None, self._auto(row))
        elif any(_equal(value, same) for same in row.same):
            self.honour(key, None, row.reason or "as Meshwright does")
        elif row.ignored:
            self.ignore(key, row.ignored)
        elif row.to and (row.values is None or _spelled(value) in _lower(row.values)):
            self._set_to(key, value, row)
        elif row.by_rule and not row.unsupported:
            self.contradict([key], f"{value!r} is not a value of {key}")
        else:
            reason = row.unsupported
            if row.to and row.values is not None:
                choices = ", ".join(dict.fromkeys(str(v) for v in row.values.values()))
                reason = (
                    f"{reason}; {row.to} has {choices}" if reason else f"{row.to} has {choices}"
                )
            settled = (row.to,) if row.to else ()
            entry = KeyReport(key, value, "unsupported", {}, reason, row.changes, settled)
            self.entries[key] = entry

    def _auto(self, row: KeyRow) -> str:
        """Return the note on the value "auto": the key is the base config's or has its default."""
        if not row.to:
            return "as the base config or the default has it"
        base = self.target(row.to)
        if base is not None:
            whose = "given" if row.to in self.setting.given else "the base config's"
            return f"{whose}: {row.to} = {base}"
        if row.to in _DERIVED:
            return f"as Meshwright derives {row.to} from the rest"
        section, _, name = row.to.partition(".")
        default = SECTIONS[section].model_fields[name].get_default()
        return f"the default: {row.to} = {default}"

    def _set_to(self, key: str, value: Any, row: KeyRow) -> None:
        new = value if row.values is None else _lower(row.values)[_spelled(value)]
        # JSON and YAML of others write whole numbers as 1e5 or 5.0 too
        if isinstance(new, float) and new.is_integer() and _is_whole(row.to):
            new = int(new)
        wrong = _invalid(row.to, new)
        if isinstance(value, str) and "$" in value:
            reason = f"set when the script runs: give {row.to}"
            self.refuse(key, reason, settled_by=[row.to])
        elif wrong:
            self.contradict([key], wrong, [row.to])
        elif row.but or not _equal(new, value):
            self.translate(key, {row.to: new}, row.but)
        else:
            self.honour(key, {row.to: new})

    def _unknown(self, key: str, value: Any) -> None:
        rows = [name for table in self.tables for name in table.rows]
        if value == {} and any(name.startswith(f"{key}.") for name in rows):
            self.ignore(key, "an empty section")
            return
        known = [name for name in rows if "*" not in name]
        close = nearest(key, known)
        hint = f"; nearest known: {close[0]}" if close else ""
        reason = f"unknown to {self.tables[0].name} as Meshwright knows it{hint}"
        self.entries[key] = KeyReport(key, value, "unsupported", {}, reason, changes=True)

    def _off(self, key: str) -> str | None:
        """Return the key that switches off the section or feature of a key, or None."""
        parts = key.split(".")
        switched = {name for table in self.tables for name in table.switched}
        for depth in range(1, len(parts)):
            section = ".".join(parts[:depth])
            for name in (f"{section}.enabled", f"{section}.shared_parameters.enabled"):
                if name != key and self.values.get(name) is False:
                    return name
            name = f"{section}.enabled"
            if section in switched and self.values.get(name) is None and key != name:
                return name
        for table in self.tables:
            for pattern, switch in table.switches.items():
                if fnmatchcase(key, pattern) and key != switch and not self.values.get(switch):
                    return switch
        return None

    def _take(self, key: str, verdict: Verdict, to: Mapping[str, Any] | None, note: str) -> None:
        if key in self.values and key not in self.entries:
            self.entries[key] = KeyReport(key, self.values[key], verdict, dict(to or {}), note)


def _is_whole(name: str) -> bool:
    """Return whether a Meshwright key must be an integer."""
    section, _, key = name.partition(".")
    return SECTIONS[section].model_fields[key].annotation in (int, int | None, Zero)


def _invalid(name: str, value: Any) -> str:
    """Return why a value is invalid for a Meshwright key, or "" if it is valid."""
    section, _, key = name.partition(".")
    try:
        SECTIONS[section].__pydantic_validator__.validate_python({key: value})
    except ValidationError as error:
        for detail in error.errors():
            if detail["loc"][:1] == (key,):
                reason = detail["msg"].removeprefix("Value error, ")
                return f"{name} = {value!r}: {reason[0].lower()}{reason[1:]}"
    return ""


def _equal(first: Any, second: Any) -> bool:
    """Return whether two values are equal; True and 1 are not."""
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


def _spelled(value: Any) -> str:
    return str(value).lower()


def _lower(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.lower(): value for name, value in values.items()}
