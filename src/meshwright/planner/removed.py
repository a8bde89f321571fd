"""Axes that a rule takes out of a search altogether, such as tp by an odd number of heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from meshwright.cost.inputs import CostInputs
from meshwright.layout import Layout, broken
from meshwright.layout.rules import divisors, nearest_legal
from meshwright.planner.space import Pins

# The axes of a layout, by their names, with what else a layout that uses them may have.
_AXES: Final[Mapping[str, tuple[str, tuple[Mapping[str, Any], ...]]]] = {
    "dp_replicate": ("data parallelism", ({},)),
    "tp": ("tensor parallelism", ({},)),
    "cp": ("context parallelism", ({"cp_kind": "ring"}, {"cp_kind": "ulysses"})),
    "pp": ("pipeline parallelism", ({},)),
}


class RemovedAxis(NamedTuple):
    """An axis that no layout of the devices can use: its key, its name, the rule, and what helps.

    The rule is that of the smallest degree.
    """

    axis: str
    name: str
    rule: str
    nearest: tuple[str, ...]

    def __str__(self) -> str:
        helps = f"; {' or '.join(self.nearest)} would allow it" if self.nearest else ""
        return f"no {self.name}: {self.rule}{helps}"


def removed_axes(setting: CostInputs, devices: int, pins: Pins | None = None) -> list[RemovedAxis]:
    """Return the axes of which the rules allow no degree above 1, though the devices do.

    Those that the config fixes are left out.
    """
    return [
        removed
        for axis in _AXES
        if axis not in (pins or {})
        for removed in [_removed(setting, devices, axis)]
        if removed is not None
    ]


def _removed(setting: CostInputs, devices: int, axis: str) -> RemovedAxis | None:
    model, train = setting.model, setting.train
    first: tuple[str, Layout] | None = None
    for layout in _layouts(devices, axis):
        rule = broken(model, train, layout)
        if rule is None:
            return None
        first = first or (rule, layout)
    if first is None:  # a single device
        return None
    rule, layout = first
    changes = nearest_legal(model, train, layout)
    helps = tuple(change for change in changes if not change.startswith("layout."))
    return RemovedAxis(axis, _AXES[axis][0], rule, helps)


def _layouts(devices: int, axis: str) -> Iterator[Layout]:
    """Yield layouts with each degree of an axis, the smallest first, one sequence a microbatch."""
    for degree in divisors(devices):
        for further_keys in _AXES[axis][1] if degree > 1 else ():
            yield Layout(**{axis: degree, **further_keys})
