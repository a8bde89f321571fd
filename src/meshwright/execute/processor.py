"""The processor at hand. No torch here."""

from __future__ import annotations

from pathlib import Path

from meshwright.program.target import Processor


def processor(file: Path = Path("/proc/cpuinfo")) -> Processor:
    """Return this machine's, or a nameless one where the system doesn't tell."""
    found: dict[str, str] = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    family = found.get("cpu family", "")
    return Processor(found.get("vendor_id", ""), int(family) if family.isdecimal() else 0)
