"""`MicrobatchTimes`: the seconds of a microbatch in a layer of each kind and in the ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES
from meshwright.predict.kernels import Kernels, Seconds
from meshwright.predict.setting import Setting, work_of
from meshwright.predict.work import HeldLayers


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


def parts_of(setting: Setting, kernels: Kernels, layout: Layout) -> MicrobatchTimes:
    """Return the seconds of a layout's microbatch in layers and in the ends."""
    found = work_of(setting, layout)
    defers = layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward
    first, last = kernels.ends(found, layout.tp, defers=defers)
    shape = (layout.cp, layout.tp, layout.cp_kind, layout.recompute, layout.ep, layout.etp)
    layers = tuple(kernels.layer(found, work, *shape, defers=defers) for work in found.layers)
    return MicrobatchTimes(layers, first, last)
