"""Activations in host memory: how many bytes, and how long a microbatch waits for their copies."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.cost.inputs import CostInputs, layers_of_ranks, work_of
from meshwright.cost.kernels import Kernels, Seconds
from meshwright.cost.microbatch import MicrobatchTimes
from meshwright.cost.pipeline import in_flight
from meshwright.cost.work import RankLayers
from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES


class CopyWaits(NamedTuple):
    """Seconds that a microbatch waits for copies: layers by kind, for each pass.

    `first` is the whole copy of a layer that nothing computes beside, with which the backward of a
    stage begins unless it `is_there`: the last stage's, after its own forward.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    first: float
    is_there: bool

    def passes(self, held_layers: RankLayers, stages: int = 1) -> tuple[float, float]:
        """Return the seconds of a forward and a backward of so many stages with such layers."""
        if not self.first:  # nothing is copied, or in no time
            return 0.0, 0.0
        begins = stages - (self.is_there and held_layers.has_head)
        return held_layers.total(self.forward), held_layers.total(
            self.backward
        ) + begins * self.first

    def of(self, held_layers: RankLayers, stages: int = 1) -> float:
        """Return both together."""
        return sum(self.passes(held_layers, stages))


def copy_waits(
    setting: CostInputs, kernels: Kernels, layout: Layout, parts: MicrobatchTimes
) -> CopyWaits:
    """Return how long the layers of a microbatch wait for the link between device and host.

    What a layer saves leaves while the next one computes, and comes back while the one after it
    goes back, so the longer of the two counts. A CPU copies by itself, beside nothing.
    """
    if layout.offload != "activations":
        nothing = (0.0,) * len(parts.layers)
        return CopyWaits(nothing, nothing, 0.0, is_there=True)
    moved = [sum(size for _, size in work.leaves) for work in work_of(setting, layout).layers]
    copies = [size / setting.cluster.host.bandwidth for size in moved]
    overlap = kernels.overlap if setting.traits.runs_ahead else 0.0

    def wait(sent: float, computed: float) -> float:
        return sent - overlap * min(sent, computed)

    def ahead(seconds: Seconds) -> float:
        return seconds.forward + seconds.tp_forward + seconds.cp_forward + seconds.ep_forward

    pairs = list(zip(copies, parts.layers, strict=True))
    return CopyWaits(
        tuple(wait(copy, ahead(seconds)) for copy, seconds in pairs),
        # The first of a backward is beside nothing.
        tuple(wait(copy, seconds.total - ahead(seconds)) for copy, seconds in pairs),
        max(copies),
        is_there=layout.pp == 1 or not SCHEDULES[layout.schedule].holds_all,
    )


def host_bytes(setting: CostInputs, layout: Layout) -> float:
    """Return the bytes of host memory that the activations of one rank take at most.

    What all layers in flight have moved, in closed form.
    """
    if layout.offload != "activations":
        return 0.0
    count = layout.microbatches(setting.train.batch)
    leaves = [sum(size for _, size in work.leaves) for work in work_of(setting, layout).layers]
    return max(
        held_layers.total(leaves) / layout.virtual_stages * in_flight(layout, rank, count)
        for rank, held_layers in enumerate(layers_of_ranks(setting, layout))
    )
