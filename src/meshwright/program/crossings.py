"""What tp ranks send where the residual stream enters and leaves a tensor-parallel region.

Megatron-LM, arXiv:1909.08053, section 3; with sequence parallelism arXiv:2205.05198, section 4.2.
The program counts the messages of a step from this, and `parallel` sends from it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from meshwright.layout import Layout
from meshwright.program.messages import CollectiveKind


class Crossing(NamedTuple):
    """One direction: the collective of the stream, and that of its gradient in the backward."""

    forward: CollectiveKind | None
    backward: CollectiveKind | None


class Crossings(NamedTuple):
    """Both directions at the border of a region."""

    entry: Crossing
    exit: Crossing


_NONE: Final = Crossings(Crossing(None, None), Crossing(None, None))
# The stream is whole on each rank: it enters as it is, and what leaves are parts of a sum.
_WHOLE: Final = Crossings(Crossing(None, "all_reduce"), Crossing("all_reduce", None))
# The stream is cut along the sequence: it is gathered, and the sum of the parts is cut again.
_CUT: Final = Crossings(
    Crossing("all_gather", "reduce_scatter"), Crossing("reduce_scatter", "all_gather")
)


def crossings(layout: Layout) -> Crossings:
    """Return what a layout sends at the borders of its regions."""
    return crossings_of(layout.tp, layout.sp)


def crossings_of(tp: int, sp: bool) -> Crossings:
    """Return the crossings for so many tp ranks, with or without sequence parallelism."""
    if tp == 1:
        return _NONE
    return _CUT if sp else _WHOLE
