"""The gradient sums after the last microbatch that are not data parallelism's.

Under sequence parallelism, norms see different tokens on each tp rank, so their gradients are
summed over tp; a tied embedding has one gradient as embedding and one as head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from meshwright.layout.schedules import SCHEDULES
from meshwright.program.lower import Program
from meshwright.program.messages import Axis
from meshwright.program.stages import Stage

_TIED = "embed.weight"


class GradientSum(NamedTuple):
    """A sum of the gradients of some parameters over an axis, in one message.

    With axis None, both copies of the parameter are on this rank.
    """

    axis: Axis | None
    names: tuple[str, ...]
    reason: str


def gradient_sums(program: Program, stages: Iterable[Stage]) -> Iterator[GradientSum]:
    """Yield the gradient sums of a rank that holds some stages, in the order of execution."""
    layout, names = program.layout, [n for stage in stages for n in program.parameters(stage)]
    partial = [name for name in names if program.shardings[name].is_partial]
    if layout.tp > 1 and partial:
        yield GradientSum("tp", tuple(partial), "gradients of what sees a part of the tokens")
    is_tied = program.model.tie_embeddings and program.shardings[_TIED].part.trained
    if is_tied and layout.pp > 1 and _TIED in names:
        axis: Axis | None = None if SCHEDULES[layout.schedule].is_v else "ends"
        yield GradientSum(axis, (_TIED,), "gradients of the tied embedding and head")
