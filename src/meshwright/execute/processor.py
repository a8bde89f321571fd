"""The processor at hand. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from meshwright.program.target import Processor

_FILE: Final = Path("/proc/cpuinfo")


def processor_facts(file: Path = _FILE) -> dict[str, str]:
    """Return what Linux says of the first processor, by its keys; nothing on other systems."""
    found: dict[str, str] = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    return found


def processor(file: Path = _FILE) -> Processor:
    """Return this machine's processor, or a nameless one where the system doesn't tell."""
    found = processor_facts(file)
    family = found.get("cpu family", "")
    return Processor(found.get("vendor_id", ""), int(family) if family.isdecimal() else 0)
