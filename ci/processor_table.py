"""The processors of ci/processors.toml: what the tests are to see of each, and what it takes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# How oneDNN and MKL name in their output what the table limits them to.
_ONEDNN_SAYS: Final = {
    "SSE41": "SSE4.1",
    "AVX2": "AVX2",
    "AVX512_CORE": "AVX512DQ extensions",
    "AVX512_CORE_BF16": "DL Boost and bfloat16",
    "AVX10_1_512_AMX": "AMX",
}
_MKL_SAYS: Final = {
    "SSE4_2": "(Intel(R) SSE4.2)",
    "AVX2": "(Intel(R) AVX2)",
    "AVX512": "(Intel(R) AVX-512)",
    "COMPATIBLE": "CNR:COMPATIBLE",
}


@dataclass(frozen=True)
class Processor:
    """A processor to emulate; the fields are those of the table."""

    name: str
    vendor: str
    family: int
    cache: str
    cores: int
    aten: str
    onednn: str
    mkl: str
    route: str
    needs: tuple[str, ...]
    hides: tuple[str, ...]

    @property
    def environ(self) -> dict[str, str]:
        """The variables that limit the libraries' instructions."""
        # MKL has no name for processors without its instructions, but a mode with the same
        # results on all of them.
        mkl = "MKL_CBWR" if self.mkl == "COMPATIBLE" else "MKL_ENABLE_INSTRUCTIONS"
        return {
            "ATEN_CPU_CAPABILITY": self.aten,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            mkl: self.mkl,
        }

    def cpuinfo(self, real: str) -> str:
        """Return /proc/cpuinfo as this processor has it, from the real one."""
        ours = {
            "vendor_id": self.vendor,
            "cpu family": str(self.family),
            "model name": f"{self.name} (emulated)",
            "cache size": self.cache,
        }
        block, lines = real.strip().split("\n\n")[0], []
        for line in block.splitlines():
            name = line.partition(":")[0].strip()
            if name == "flags":
                flags = line.partition(":")[2].split()
                ours[name] = " ".join(one for one in flags if not one.startswith(self.hides))
            lines.append(f"{name}\t: {ours[name]}" if name in ours else line)
        numbered = [line for line in lines if not line.startswith("processor")]
        blocks = ("\n".join([f"processor\t: {at}", *numbered]) for at in range(self.cores))
        return "\n\n".join(blocks) + "\n\n"

    @staticmethod
    def vendor_of(cpuinfo: str) -> str:
        """Return the vendor that /proc/cpuinfo names, "" if it names none."""
        found = re.search(r"^vendor_id\s*:\s*(\S+)", cpuinfo, re.MULTILINE)
        return found[1] if found else ""

    def lacking(self, cpuinfo: str) -> list[str]:
        """Return the flags that it needs and the real processor does not have."""
        flags = next((x for x in cpuinfo.splitlines() if x.startswith("flags")), "").split()
        return [one for one in self.needs if one not in flags]

    def differences(self, seen: Mapping[str, Any], real_vendor: str) -> list[str]:
        """Return what a process sees otherwise than this processor has it."""
        expected: dict[str, Any] = {
            "vendor": self.vendor,
            "family": self.family,
            "cache": self.cache,
            "cores": self.cores,
            "route": self.route,
            "aten": self.aten.upper(),
        }
        wrong = [
            f"{key} {seen[key]!r} instead of {value!r}"
            for key, value in expected.items()
            if seen[key] != value
        ]
        said = {"onednn": _ONEDNN_SAYS[self.onednn]}
        if real_vendor == "GenuineIntel":  # elsewhere MKL's limits have no effect
            said["mkl"] = _MKL_SAYS[self.mkl]
        wrong += [
            f"{key} {seen[key]!r}, which is not {text!r}"
            for key, text in said.items()
            if text not in seen[key]
        ]
        return wrong


def _table(file: Path) -> dict[str, Processor]:
    rows: dict[str, dict[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8"))
    return {name: _row(name, **row) for name, row in rows.items()}


def _row(name: str, needs: list[str], hides: list[str], **rest: Any) -> Processor:
    return Processor(name, needs=tuple(needs), hides=tuple(hides), **rest)


TABLE: Final = _table(Path(__file__).with_name("processors.toml"))
