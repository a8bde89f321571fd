"""The model of this machine's CPU. Doesn't import torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from meshwright.program.target import Processor

_FILE: Final = Path("/proc/cpuinfo")
# What tells processors apart, of x86 and of Arm: virtual machines give several the same name.
_TELLING: Final = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
)


def processor_facts(file: Path = _FILE) -> dict[str, str]:
    """Return the entries of /proc/cpuinfo for the first processor; empty on other systems."""
    facts: dict[str, str] = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    return facts


def processor(file: Path = _FILE) -> Processor:
    """Return the vendor and family of this machine's CPU; empty and 0 if the system doesn't say."""
    facts = processor_facts(file)
    family = facts.get("cpu family", "")
    return Processor(facts.get("vendor_id", ""), int(family) if family.isdecimal() else 0)


def fingerprint(file: Path = _FILE) -> str:
    """Return eight hex digits that identify the CPU's model and features."""
    facts = processor_facts(file)
    identity = json.dumps([facts.get(name, "") for name in _TELLING])
    return hashlib.sha256(identity.encode()).hexdigest()[:8]
