"""Which parts of a sequence a rank holds or routes to experts, among the ranks that share the
sequence."""

from __future__ import annotations

import math
from typing import Literal

from meshwright.layout import Layout
from meshwright.program.messages import Axis


def pieces_of(layout: Layout, cp_rank: int, tp_rank: int) -> tuple[int, ...]:
    """Return which of a sequence's equal pieces a rank's router sees, in the order of its tokens.

    Context ranks have the pieces of `held`. If the layout folds (`Layout.folds`), tp ranks divide
    these further, into pieces so small that none is shared.
    """
    pieces = held(layout.cp_kind if layout.cp > 1 else "ulysses", layout.cp, cp_rank)
    if layout.folds == 1:
        return pieces
    cuts = math.lcm(len(pieces), layout.folds) // len(pieces)
    smaller = [piece * cuts + part for piece in pieces for part in range(cuts)]
    share = len(smaller) // layout.folds
    return tuple(smaller[tp_rank * share : (tp_rank + 1) * share])


def held(kind: Literal["ring", "ulysses"], cp: int, rank: int) -> tuple[int, ...]:
    """Return which of a sequence's equal pieces a context-parallel rank holds, ascending.

    Ring: of 2 cp pieces, r and 2 cp - 1 - r, so that all ranks have equal work under the causal
    mask (Llama 3, arXiv:2407.21783, section 3.3.2). Ulysses: the r-th of cp.
    """
    return (rank, 2 * cp - 1 - rank) if kind == "ring" else (rank,)


def shared_over(layout: Layout) -> tuple[Axis, ...]:
    """Return the axes of the ranks whose routers see different tokens of the same sequences."""
    axes: tuple[tuple[Axis, int], ...] = (("tp", layout.folds), ("cp", layout.cp))
    return tuple(axis for axis, ranks in axes if ranks > 1)
