"""The time of gradient accumulation: adding a microbatch's gradients to the earlier ones."""

from __future__ import annotations

from typing import Final, NamedTuple

from meshwright.cost.elements import elements_of
from meshwright.cost.inputs import CostInputs
from meshwright.cost.kernels import Kernels
from meshwright.cost.work import RankLayers
from meshwright.layout import Layout
from meshwright.program.sizes import ELEMENT_BYTES
from meshwright.spec.model import ModelSpec

_FP32: Final = ELEMENT_BYTES["fp32"]


class GradientSums(NamedTuple):
    """Seconds of gradient accumulation per weight element in a backward, as the mean over
    microbatches."""

    model: ModelSpec
    layout: Layout
    seconds: float

    def of(self, held_layers: RankLayers) -> float:
        """Return the seconds of accumulation in one backward through these layers."""
        if not self.seconds:
            return 0.0
        elements = elements_of(
            self.model, self.layout, held_layers, is_padded=False, which="trained"
        )
        return self.seconds * elements.total


def sums_of(setting: CostInputs, kernels: Kernels, layout: Layout) -> GradientSums:
    """Return the time of gradient accumulation, which memory bandwidth bounds.

    From the second microbatch on, the gradient and the sum are read, and the sum is written. The
    first gradient becomes the sum, after a cast to fp32 where products are in half precision. ZeRO
    2 and 3 copy whole gradients into communication buffers instead, which moves about as much.
    """
    count, element = layout.microbatches(setting.train.batch), setting.element
    first = element + _FP32 if element != _FP32 else 0
    moved = (first + (count - 1) * (element + 2 * _FP32)) / count
    seconds = kernels.slower * moved / kernels.bandwidth if setting.system.sums_apart else 0.0
    return GradientSums(setting.model, layout, seconds)
