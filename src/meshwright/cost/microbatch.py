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
    """Seconds of a microbatch in a layer of each kind, before the layers (`first`) and after them
    (`last`)."""

    layers: tuple[Seconds, ...]
    first: Seconds
    last: Seconds

    def of(self, held_layers: RankLayers, cause: str) -> float:
        """Return the seconds of one cause, a field of `Seconds`, in a microbatch on a rank with
        these layers."""
        seconds = held_layers.total(getattr(layer, cause) for layer in self.layers)
        if held_layers.has_embedding:
            seconds += getattr(self.first, cause)
        if held_layers.has_head:
            seconds += getattr(self.last, cause)
        return seconds

    @cached_property
    def totals(self) -> tuple[tuple[float, ...], float, float]:
        """The seconds over all causes of a layer of each kind, of the embedding, and of norm and
        head."""
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
    """Computes and caches the seconds of a microbatch in each kind of layer and in the ends of the
    model.

    A layer without experts takes the same time whatever the expert parallelism. So do embedding and
    head, which recomputation does not change either.
    """

    def __init__(self, setting: CostInputs, kernels: Kernels) -> None:
        self._setting, self._kernels = setting, kernels
        model = setting.model
        self._has_experts = [model.has_experts(kind) for kind in model.layer_kinds]
        self._layers: dict[tuple[object, ...], Seconds] = {}
        self._ends: dict[tuple[object, ...], tuple[Seconds, Seconds]] = {}

    def of(self, layout: Layout) -> MicrobatchTimes:
        """Return the seconds of a layout's microbatch."""
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
    """Return the seconds of one layout's microbatch, without a cache."""
    return TimesOfParts(setting, kernels).of(layout)
