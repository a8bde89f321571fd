"""The verdict on a trainer's run as lines of text, as JSON, and as Markdown for an issue
tracker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from meshwright.prove.trainers.judge import RunVerdict
from meshwright.prove.trainers.observed import MeshAxis
from meshwright.units import counted

VERDICT: Final = "verdict.json"
ISSUE: Final = "issue.md"
# Packages whose versions decide what a run computes.
_PACKAGES: Final = (
    *("torch", "transformers", "accelerate", "deepspeed", "trl", "torchtitan"),
    "megatron-core",
)
_SHOWN: Final = 8


@dataclass(frozen=True)
class TrainerVerdict:
    """A verdict with what it is about; `notes` say what was found and what was not compared.

    `case` has what there is to reduce of the run (`reduction.case_of`).
    """

    verdict: RunVerdict
    world: int
    axes: tuple[MeshAxis, ...]
    steps: int
    notes: tuple[str, ...]
    case: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the run could be compared and everything agrees."""
        return self.verdict.passed

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as a JSON-ready object, with the versions of packages."""
        return {
            **self.verdict.as_dict(),
            "world": self.world,
            "axes": {axis.name: axis.size for axis in self.axes},
            "steps": self.steps,
            "notes": list(self.notes),
            "versions": versions(),
            "case": {**self.case, "python": sys.executable},
        }

    def lines(self) -> list[str]:
        """Return the verdict as lines of text."""
        return verdict_lines(self.as_dict())

    def write(self, folder: Path) -> None:
        """Write `verdict.json` to a folder, and `issue.md` if there is a fault."""
        document = self.as_dict()
        (folder / VERDICT).write_text(json.dumps(document, indent=1) + "\n")
        if self.verdict.faults:
            (folder / ISSUE).write_text(issue_text(document))


def verdict_lines(verdict: dict[str, Any]) -> list[str]:
    """Return the lines of text for a verdict in the form of `TrainerVerdict.as_dict`."""
    layout = ", ".join(f"{name} = {size}" for name, size in verdict["axes"].items()) or "one rank"
    head = f"{verdict['world']} ranks ({layout}), {verdict['steps']} steps"
    notes = [f"  {note}" for note in verdict["notes"]]
    if verdict["refused"] is not None:
        return [f"REFUSED {head}: {verdict['refused']}", *notes]
    if not verdict["faults"]:
        worst = verdict["worst_share_of_tolerance"]
        text = f"PASS {head}: {verdict['compared']} tensors and numbers are those of one process"
        return [f"{text}; the largest error is {worst:.0%} of its tolerance", *notes]
    lines = [f"FAIL {head}: {counted(len(verdict['faults']), 'fault')}"]
    for fault in verdict["faults"][:_SHOWN]:
        lines.append(f"  [{fault['kind']}] step {fault['step']}: {fault['sentence']}")
        lines.append(
            f"     off by {_short(fault['error'])}, tolerated {_short(fault['tolerance'])}"
        )
    if len(verdict["faults"]) > _SHOWN:
        lines.append(f"  and {len(verdict['faults']) - _SHOWN} more in {VERDICT}")
    return lines + notes


def issue_text(verdict: dict[str, Any], smallest: Sequence[str] = ()) -> str:
    """Return Markdown for an issue tracker: what is wrong, where, with which versions.

    `smallest` has lines about the smallest case that shows it.
    """
    layout = ", ".join(f"{name} = {size}" for name, size in verdict["axes"].items())
    packages = ", ".join(f"{name} {number}" for name, number in verdict["versions"].items())
    lines = [
        "## Gradients differ from those of one process",
        "",
        f"{verdict['world']} ranks ({layout}); {packages}.",
        "The same microbatches, replayed in one process on the unsharded model from the same "
        "weights, give other values:",
        "",
    ]
    for fault in verdict["faults"]:
        lines.append(f"- **{fault['kind']}** (step {fault['step']}): {fault['sentence']}.")
        ranks = ", ".join(map(str, fault["ranks"]))
        lines.append(
            f"  Relative error {_short(fault['error'])}, measured rounding allows "
            f"{_short(fault['tolerance'])}." + (f" Ranks: {ranks}." if ranks else "")
        )
        if len(fault["tensors"]) > 2:
            lines += ["", "  Parameters:", *(f"  - `{name}`" for name in fault["tensors"]), ""]
    lines += ["", *(f"- {note}" for note in verdict["notes"]), "", *smallest]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the run has imported, by name."""
    by_package = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        if name == "torch" or name.replace("-", ".") in sys.modules or name in sys.modules:
            try:
                by_package[name] = version(name)
            except PackageNotFoundError:
                continue
    return by_package


def _short(number: Any) -> str:
    return f"{float(number):.2g}"
