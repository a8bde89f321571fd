"""How many published measurements are similar to a prediction: same system, kind of device, or kind
of layout.

The counts are in `evidence.toml`; `benchmarks.published_pooled --evidence` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Final

from meshwright.cost.inputs import CostInputs
from meshwright.layout import Layout
from meshwright.parsing import parse_toml
from meshwright.units import counted

_AXES: Final = ("tp", "pp", "cp", "ep")
# One source alone cannot tell what is its own from what its system has.
SEVERAL: Final = 2


def kind_of_layout(layout: Layout) -> str:
    """Return the parallel axes of a layout other than data parallelism, such as "tp x pp"; "data"
    if none."""
    return " x ".join(axis for axis in _AXES if getattr(layout, axis) > 1) or "data"


def evidence(setting: CostInputs, layout: Layout) -> str:
    """Return a line with the numbers of published sources that share the prediction's system,
    device or axes."""
    system, device, layouts = _kinds(setting, layout)
    of_system, of_device, of_layout = near_sources(system, device, layouts)
    shape = "data parallelism alone" if layouts == "data" else f"{layouts} layouts"
    return (
        f"published step times near this: {counted(of_system, 'source')} of {system}, "
        f"{of_device} of devices priced like {device}, {of_layout} of {shape}"
    )


def has_evidence(setting: CostInputs, layout: Layout) -> bool:
    """Whether at least two published sources each share the system, the device and the axes of a
    prediction."""
    return min(near_sources(*_kinds(setting, layout))) >= SEVERAL


@cache
def near_sources(system: str, device: str, layouts: str) -> tuple[int, int, int]:
    """Return the numbers of published sources with this system, this kind of device, and these
    axes."""
    counts = _counts()
    return (
        counts["systems"].get(system, 0),
        counts["devices"].get(device, 0),
        counts["layouts"].get(layouts, 0),
    )


def _kinds(setting: CostInputs, layout: Layout) -> tuple[str, str, str]:
    return setting.system.name, setting.cluster.device.kind, kind_of_layout(layout)


@cache
def _counts() -> Mapping[str, Mapping[str, int]]:
    text = resources.files("meshwright.cost").joinpath("evidence.toml").read_text("utf-8")
    counts: Mapping[str, Mapping[str, int]] = parse_toml(text)
    return counts
