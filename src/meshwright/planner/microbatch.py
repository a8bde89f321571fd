"""The microbatch of a layout that doesn't set it: the fastest or the largest that fits."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import worst_memory
from meshwright.layout import Layout, broken
from meshwright.layout.rules import divisors
from meshwright.planner.fits import Fits, preference
from meshwright.planner.rank import MARGIN
from meshwright.planner.space import is_worth
from meshwright.spec.dump import FASTEST, LARGEST
from meshwright.units import format_bytes


class Microbatch(NamedTuple):
    """A layout with its microbatch, and the reason for this size."""

    layout: Layout
    reason: str


def largest(setting: CostInputs, layout: Layout, memory: int) -> Microbatch | None:
    """Return a layout with its own microbatch, or the largest smaller one that fits such a memory.

    It is for a device of which only the memory is known. None where none fits.
    """
    train, limit = setting.train, memory * (1 - MARGIN)
    sizes = [n for n in divisors(train.batch // layout.dp) if n <= layout.microbatch]
    for size in sorted(sizes, reverse=True):
        sized = layout.model_copy(update={"microbatch": size})
        if broken(setting.model, train, sized) is None:
            needed_bytes = worst_memory(setting, sized).total
            if needed_bytes <= limit:
                reason = f"{LARGEST}, with {format_bytes(needed_bytes)} of {format_bytes(memory)}"
                return Microbatch(sized, f"{reason}, as predicted")
    return None


def fastest(setting: CostInputs, layout: Layout) -> Microbatch | None:
    """Return a layout with the planner's choice of microbatch; None where none fits."""
    device, train = setting.cluster.device, setting.train
    fits = Fits(setting, device.memory * (1 - MARGIN))
    sizes = [size for size in divisors(train.batch // layout.dp) if is_worth(size, train, layout)]
    tried = [layout.model_copy(update={"microbatch": size}) for size in sizes]
    legal = [candidate for candidate in tried if broken(setting.model, train, candidate) is None]
    light = [candidate for candidate in legal if fits.estimate(candidate).total <= fits.limit]
    for timed in sorted(map(fits.timed, light), key=preference):
        prediction = fits.priced(timed)
        if prediction.memory.total <= fits.limit:
            needed = format_bytes(prediction.memory.total)
            reason = f"{FASTEST}, with {needed} of {format_bytes(device.memory)}"
            return Microbatch(prediction.layout, f"{reason}, as predicted")
    return None
