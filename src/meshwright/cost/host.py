"""Offload of activations to host memory: the bytes, and the seconds that microbatches wait for
copies."""

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
    """Seconds that a microbatch waits for copies of activations, in a forward and in a backward.

    `forward` and `backward` have a layer of each kind. `first` is the copy with which the backward
    of a stage begins, which overlaps with nothing. With `is_there`, the last stage needs none,
    because its backward follows its own forward.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    first: float
    is_there: bool

    def passes(self, held_layers: RankLayers, stages: int = 1) -> tuple[float, float]:
        """Return the seconds of waiting in a forward and a backward of a rank with these layers in
        `stages` stages."""
        if not self.first:  # nothing is copied, or in no time
            return 0.0, 0.0
        begins = stages - (self.is_there and held_layers.has_head)
        return held_layers.total(self.forward), held_layers.total(
            self.backward
        ) + begins * self.first

    def of(self, held_layers: RankLayers, stages: int = 1) -> float:
        """Return the seconds of waiting in forward and backward together."""
        return sum(self.passes(held_layers, stages))


def copy_waits(
    setting: CostInputs, kernels: Kernels, layout: Layout, parts: MicrobatchTimes
) -> CopyWaits:
    """Return the seconds that layers wait for copies of activations between device and host.

    The activations of a layer are copied to the host while the next one computes, and back while
    the layer after it computes its backward, so the longer of the two counts. On a CPU, copies
    overlap with nothing.
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
    """Return the most bytes of host memory that the offloaded activations of a rank take, in closed
    form."""
    if layout.offload != "activations":
        return 0.0
    count = layout.microbatches(setting.train.batch)
    leaves = [sum(size for _, size in work.leaves) for work in work_of(setting, layout).layers]
    return max(
        held_layers.total(leaves) / layout.virtual_stages * in_flight(layout, rank, count)
        for rank, held_layers in enumerate(layers_of_ranks(setting, layout))
    )
