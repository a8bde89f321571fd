"""The collectives of tp ranks where the residual stream enters and leaves a tensor-parallel region.

Megatron-LM, arXiv:1909.08053, section 3; with sequence parallelism arXiv:2205.05198, section 4.2.
The program counts the messages of a step from this table, and `parallel` sends by it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from meshwright.layout import Layout
from meshwright.program.messages import CollectiveKind


class TPCollective(NamedTuple):
    """The collective of the stream in the forward, and that of its gradient in the backward; None
    if none is sent."""

    forward: CollectiveKind | None
    backward: CollectiveKind | None


class TPCollectives(NamedTuple):
    """The collectives at the entry and at the exit of a tensor-parallel region."""

    entry: TPCollective
    exit: TPCollective


_NONE: Final = TPCollectives(TPCollective(None, None), TPCollective(None, None))
# The stream is whole on each rank: it enters as it is, and what leaves are parts of a sum.
_WHOLE: Final = TPCollectives(TPCollective(None, "all_reduce"), TPCollective("all_reduce", None))
# The stream is cut along the sequence: it is gathered, and the sum of the parts is cut again.
_CUT: Final = TPCollectives(
    TPCollective("all_gather", "reduce_scatter"), TPCollective("reduce_scatter", "all_gather")
)


def tp_collectives(layout: Layout) -> TPCollectives:
    """Return the collectives at the entries and exits of a layout's tensor-parallel regions."""
    return tp_collectives_of(layout.tp, layout.sp)


def tp_collectives_of(tp: int, sp: bool) -> TPCollectives:
    """Return the collectives for `tp` ranks, with or without sequence parallelism."""
    if tp == 1:
        return _NONE
    return _CUT if sp else _WHOLE
