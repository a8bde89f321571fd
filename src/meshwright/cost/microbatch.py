"""`MicrobatchTimes`: the seconds of a microbatch in a layer of each kind and in the ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.cost.kernels import Kernels, Seconds
from meshwright.cost.setting import Setting, work_of
from meshwright.cost.work import HeldLayers
from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES


@dataclass(frozen=True)
class MicrobatchTimes:
    """Seconds of a microbatch in a layer of each kind and in the ends."""

    layers: tuple[Seconds, ...]
    first: Seconds
    last: Seconds

    def of(self, held: HeldLayers, cause: str) -> float:
        """Return one cause's seconds of a microbatch on a pipeline rank."""
        seconds = held.total(getattr(layer, cause) for layer in self.layers)
        if held.has_embedding:
            seconds += getattr(self.first, cause)
        if held.has_head:
            seconds += getattr(self.last, cause)
        return seconds

    @cached_property
    def totals(self) -> tuple[tuple[float, ...], float, float]:
        """Seconds over all causes: a layer of each kind, the first end, the last end."""
        return tuple(layer.total for layer in self.layers), self.first.total, self.last.total

    def total(self, held: HeldLayers) -> float:
        """Return the seconds of one microbatch on a pipeline rank, over all causes."""
        layers, first, last = self.totals
        seconds = held.total(layers)
        if held.has_embedding:
            seconds += first
        return seconds + (last if held.has_head else 0.0)

    def room(self, held: HeldLayers) -> float:
        """Return the seconds of a microbatch that data-parallel messages can overlap with."""
        return sum(self.of(held, cause) for cause in ("forward", "backward", "recompute"))


class TimesOfParts:
    """Seconds of a microbatch in parts of a model, computed once for all layouts that share them.

    A layer without experts takes the same time however experts are shared out. So do the ends,
    which recomputation leaves alone, too.
    """

    def __init__(self, setting: Setting, kernels: Kernels) -> None:
        self._setting, self._kernels = setting, kernels
        model = setting.model
        self._has_experts = [model.has_experts(kind) for kind in model.layer_kinds]
        self._layers: dict[tuple[object, ...], Seconds] = {}
        self._ends: dict[tuple[object, ...], tuple[Seconds, Seconds]] = {}

    def of(self, layout: Layout) -> MicrobatchTimes:
        """Return the seconds of a layout's microbatch in layers and in the ends."""
        one, found = layout, work_of(self._setting, layout)
        defers = one.pp > 1 and SCHEDULES[one.schedule].splits_backward
        cut = (one.tp, one.sp, one.cp, one.microbatch, defers)
        if cut not in self._ends:
            self._ends[cut] = self._kernels.ends(found, one.tp, defers=defers)
        layers = []
        for at, routes in enumerate(self._has_experts):
            shared_out = (one.ep, one.etp) if routes else (1, None)
            key = (at, *cut, one.cp_kind, one.recompute, *shared_out)
            if key not in self._layers:
                shape = (one.cp, one.tp, one.cp_kind, one.recompute, *shared_out)
                self._layers[key] = self._kernels.layer(
                    found, found.layer(at), *shape, defers=defers
                )
            layers.append(self._layers[key])
        return MicrobatchTimes(tuple(layers), *self._ends[cut])


def parts_of(setting: Setting, kernels: Kernels, layout: Layout) -> MicrobatchTimes:
    """Return the seconds of one layout's microbatch in layers and in the ends."""
    return TimesOfParts(setting, kernels).of(layout)
