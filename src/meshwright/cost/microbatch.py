"""`MicrobatchTimes`: the seconds of a microbatch in a layer of each kind and in the ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.cost.inputs import CostInputs, work_of
from meshwright.cost.kernels import Kernels, Seconds
from meshwright.cost.work import RankLayers
from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES


@dataclass(frozen=True)
class MicrobatchTimes:
    """Seconds of a microbatch in a layer of each kind and in the ends."""

    layers: tuple[Seconds, ...]
    first: Seconds
    last: Seconds

    def of(self, held_layers: RankLayers, cause: str) -> float:
        """Return one cause's seconds of a microbatch on a pipeline rank."""
        seconds = held_layers.total(getattr(layer, cause) for layer in self.layers)
        if held_layers.has_embedding:
            seconds += getattr(self.first, cause)
        if held_layers.has_head:
            seconds += getattr(self.last, cause)
        return seconds

    @cached_property
    def totals(self) -> tuple[tuple[float, ...], float, float]:
        """Seconds over all causes: a layer of each kind, the first end, the last end."""
        return tuple(layer.total for layer in self.layers), self.first.total, self.last.total

    def total(self, held_layers: RankLayers) -> float:
        """Return the seconds of one microbatch on a pipeline rank, over all causes."""
        layers, first, last = self.totals
        seconds = held_layers.total(layers)
        if held_layers.has_embedding:
            seconds += first
        return seconds + (last if held_layers.has_head else 0.0)

    def room(self, held_layers: RankLayers) -> float:
        """Return the seconds of a microbatch that data-parallel messages can overlap with."""
        return sum(self.of(held_layers, cause) for cause in ("forward", "backward", "recompute"))


class TimesOfParts:
    """Seconds of a microbatch in parts of a model, computed once for all layouts that share them.

    A layer without experts takes the same time however experts are shared out. So do the ends,
    which recomputation leaves alone, too.
    """

    def __init__(self, setting: CostInputs, kernels: Kernels) -> None:
        self._setting, self._kernels = setting, kernels
        model = setting.model
        self._has_experts = [model.has_experts(kind) for kind in model.layer_kinds]
        self._layers: dict[tuple[object, ...], Seconds] = {}
        self._ends: dict[tuple[object, ...], tuple[Seconds, Seconds]] = {}

    def of(self, layout: Layout) -> MicrobatchTimes:
        """Return the seconds of a layout's microbatch in layers and in the ends."""
        layout_work = work_of(self._setting, layout)
        defers = layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward
        cut = (layout.tp, layout.sp, layout.cp, layout.microbatch, defers)
        if cut not in self._ends:
            self._ends[cut] = self._kernels.ends(layout_work, layout.tp, defers=defers)
        layers = []
        for kind, routes in enumerate(self._has_experts):
            shared_out = (layout.ep, layout.etp) if routes else (1, None)
            key = (kind, *cut, layout.cp_kind, layout.recompute, *shared_out)
            if key not in self._layers:
                shape = (layout.cp, layout.tp, layout.cp_kind, layout.recompute, *shared_out)
                self._layers[key] = self._kernels.layer(
                    layout_work, layout_work.layer(kind), *shape, defers=defers
                )
            layers.append(self._layers[key])
        return MicrobatchTimes(tuple(layers), *self._ends[cut])


def parts_of(setting: CostInputs, kernels: Kernels, layout: Layout) -> MicrobatchTimes:
    """Return the seconds of one layout's microbatch in layers and in the ends."""
    return TimesOfParts(setting, kernels).of(layout)
