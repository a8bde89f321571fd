"""`Action`: an element of a pipeline schedule's table, with its inputs and transfers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from meshwright.errors import MeshwrightError

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]


class ProgramError(MeshwrightError):
    """Raised for action tables that cannot run: incomplete, in an impossible order, or
    deadlocked."""


class Action(NamedTuple):
    """One thing that a rank does for a stage and a microbatch.

    F is the forward, B the whole backward, I the backward for the stage's inputs only and W for its
    weights only. SEND_F sends the stage's output to the next stage, RECV_F receives its input from
    the one before; SEND_B sends the gradient of its input to the one before, RECV_B receives the
    gradient of its output from the next.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def is_transfer(self) -> bool:
        """Whether it sends or receives instead of computing."""
        return len(self.kind) > 1


Table = tuple[Action, ...]


def completed(action: Action) -> tuple[Action, ...]:
    """Return the actions that are complete after one; a whole backward (B) counts as its two parts
    I and W."""
    kind, stage, index = action
    return (Action("I", stage, index), Action("W", stage, index)) if kind == "B" else (action,)


def inputs(action: Action, last: int) -> tuple[Action, ...]:
    """Return the actions, on any rank, whose results a computing action needs; `last` is the last
    stage."""
    kind, stage, index = action
    if kind == "F":
        return (Action("F", stage - 1, index),) if stage > 0 else ()
    if kind == "W":
        return (Action("I", stage, index),)
    forward = Action("F", stage, index)
    return (forward, Action("I", stage + 1, index)) if stage < last else (forward,)


def sends(action: Action, ranks_of_stage: Sequence[int]) -> tuple[Action, Action, int] | None:
    """Return the transfer of a computing action's result: the SEND, the RECV, and the receiving
    rank.

    None if the result stays on the rank. `ranks_of_stage` has the pipeline rank of each stage.
    """
    if not is_sent(action, ranks_of_stage):
        return None
    kind, stage, index = action
    if kind == "F":
        to = stage + 1
        return Action("SEND_F", stage, index), Action("RECV_F", to, index), ranks_of_stage[to]
    to = stage - 1
    return Action("SEND_B", stage, index), Action("RECV_B", to, index), ranks_of_stage[to]


def is_sent(action: Action, ranks_of_stage: Sequence[int]) -> bool:
    """Whether a computing action's result is sent to another rank."""
    if action.kind == "W":
        return False
    to = action.stage + (1 if action.kind == "F" else -1)
    return 0 <= to < len(ranks_of_stage) and ranks_of_stage[to] != ranks_of_stage[action.stage]


def receives(action: Action, ranks_of_stage: Sequence[int]) -> tuple[Action, int] | None:
    """Return the RECV that a computing action waits for and the sending rank; None if its input is
    local."""
    kind, stage, index = action
    source = stage - 1 if kind == "F" else stage + 1
    is_end = not 0 <= source < len(ranks_of_stage)
    if kind == "W" or is_end or ranks_of_stage[source] == ranks_of_stage[stage]:
        return None
    return Action("RECV_F" if kind == "F" else "RECV_B", stage, index), ranks_of_stage[source]
