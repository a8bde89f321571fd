"""The tolerance of a tensor: the core of every comparison, independent of any training engine.

A tensor is compared with an exact one by their distance (the root of the summed squares). Rounding
noise is measured: the reference also runs with the rounding of a layout, several times, on one
device; the largest distance of these runs from the exact tensor is the noise. A layout rounds as
often, in another order, so its distance is one more sample of the noise. `MARGIN` allows for
chance, and for rounding that only a layout has: partial sums of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

# Largest distance of a tensor over that of one device, which makes the same roundings. A factor of
# 3 is for chance: tensors with few elements and sums that cancel vary most. A factor of 2 is for
# kernels that round more or less often, as those of fp32 products do.
MARGIN: Final = 6.0
# A tensor's distance may always be so many fp32 roundings of all of its values.
LEAST: Final = 32.0
# The margin of a tensor that vanishes except for rounding, such as the gradient of a key's bias
# without rotary dims: what is left of terms that cancel depends on how a kernel groups them.
# Layouts reached 13 times one device's noise.
VANISHING: Final = 36.0
# A tensor of at most `FEW` elements has few roundings, and those of a bias are correlated: two
# samples differed by a factor of 8.
FEW: Final = 64
FEW_MARGIN: Final = 3 * MARGIN
# How far apart numbers are, relative to themselves: of fp32 half of it, one rounding; of bf16 all,
# which is how far a weight may be off if it is rounded to the other side; of the largest codes of
# int8 0.9 / 64 (`numbers_of` in spec/optimizers/base.py).
SPACINGS: Final = {"fp32": 2.0**-24, "bf16": 2.0**-7, "int8": 2.0**-6}


class Expected(NamedTuple):
    """The reference's whole tensors by name: exact ones, and the same from several runs with
    rounding.

    If the tensors are updates, `added_to` has the weights to which they are added, and `spacing`
    the distance between neighboring numbers of the weights' dtype, relative to their size. For
    states in few bits, `added_to` are the states themselves.
    """

    exact: Mapping[str, Tensor]
    rounded: Sequence[Mapping[str, Tensor]]
    added_to: Mapping[str, Tensor] | None = None
    spacing: float = SPACINGS["fp32"]

    def difference(
        self, name: str, tensor: Tensor | None, part: Callable[[Tensor], Tensor] = lambda x: x
    ) -> tuple[float, float]:
        """Return (error, tolerance) of the whole tensor `name`, or of the part that `part` selects;
        both relative to its norm.

        The error is infinite for a missing tensor, another shape, or a NaN. `tensor` may have more
        rows than the exact one: that is padding, and must be zero.
        """
        exact = part(self.exact[name]).double()
        size = exact.norm().item()
        noise = max((part(sample[name]).double() - exact).norm().item() for sample in self.rounded)
        margin = FEW_MARGIN if exact.numel() <= FEW else MARGIN
        if noise >= size:
            margin = VANISHING
        bound = max(margin * noise, LEAST * 2.0**-24 * size, 1e-300)
        if self.added_to is not None:  # an update that vanishes may be one rounding of a weight
            weights = part(self.added_to[name]).double()
            jump = weights.norm().item()
            if self.spacing > SPACINGS["fp32"]:  # one jump, which no sample may have made
                jump = weights.abs().max().item() if weights.numel() else 0.0
            bound = max(bound, self.spacing * jump)
        has_rows = tensor is not None and 0 < exact.dim() == tensor.dim()
        if has_rows and tensor is not None and not tensor[len(exact) :].any():
            tensor = tensor[: len(exact)]
        if tensor is None or tensor.shape != exact.shape:
            return (math.inf if exact.numel() else 0.0), 1.0
        distance = (tensor.to("cpu", torch.float64) - exact).norm().item()
        over = max(size, bound)  # of what vanishes but for noise, the noise
        return (distance if distance == distance else math.inf) / over, bound / over
