"""Compares a measured step with its plan: the order of actions, idle time, and the memory peak.

There are two kinds of memory peak: that of tensors, and that of the whole process.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from meshwright.program.profile import MemoryPoint, RankProfile, StepProfile

TENSORS, PROCESS = "tensor peak", "process peak"
MEANINGS: Final = {
    TENSORS: "tensors alone",
    PROCESS: "the whole process",
}


def peak_name(peak: MemoryPoint) -> str:
    """Return whether a profile's peak is that of tensors or of the process.

    It is the process's if it includes memory that the program does not describe.
    """
    return PROCESS if peak.bytes.get("fixed") else TENSORS


def name_in_events(device: str) -> str:
    """Return whether step events have the tensor peak or the process peak, by the device's name.

    A CPU rank reports the size of its process, a GPU rank torch's allocated memory.
    """
    return PROCESS if device.startswith("CPU") or device == "cpu" else TENSORS


Done = tuple[str, int, int]  # kind, stage, microbatch


@dataclass(frozen=True)
class Agreement:
    """The comparison of a measured step with its plan.

    `difference` says where a rank first did another action than planned; None if none did.
    `planned` and `measured` are idle shares (`StepProfile.idle`), None without a pipeline.
    """

    difference: str | None
    planned: float | None
    measured: float | None

    @property
    def points(self) -> float | None:
        """The measured minus the planned idle share, in percentage points; None if unknown."""
        if self.planned is None or self.measured is None:
            return None
        return 100 * (self.measured - self.planned)

    @property
    def words(self) -> str:
        """A sentence on the order of actions and the idle shares."""
        order = self.difference or "every rank did its actions in the planned order"
        if self.planned is None or self.measured is None or self.points is None:
            return order
        direction = "more" if self.points >= 0 else "less"
        return (
            f"{order}; the pipeline was idle for {self.measured:.1%} where {self.planned:.1%} was "
            f"planned, {abs(self.points):.1f} points {direction}"
        )


def agreement(planned: StepProfile, measured: StepProfile) -> Agreement | None:
    """Return the comparison of a measured step with its plan; None if one of them has no actions.

    Each measured rank with actions is compared with the planned rank of the same pipeline stage,
    since a plan has one rank per pipeline stage.

    Idle time is compared as a share, so the plan may be for a faster device. The plan assumes a
    device for each rank: ranks that share cores delay each other at random times, and a schedule
    with little idle time then shows more of it than planned.
    """
    planned_actions = {
        rank_profile.coordinates.get("pp", 0): done_by(rank_profile)
        for rank_profile in planned.ranks
    }
    measured_ranks = [rank_profile for rank_profile in measured.ranks if done_by(rank_profile)]
    if not measured_ranks or not any(planned_actions.values()):
        return None
    differences = (
        _difference(
            rank_profile.rank,
            planned_actions.get(rank_profile.coordinates.get("pp", 0), []),
            done_by(rank_profile),
        )
        for rank_profile in measured_ranks
    )
    first_difference = next(
        (difference for difference in differences if difference is not None), None
    )
    return Agreement(first_difference, planned.idle, measured.idle)


def done_by(rank_profile: RankProfile) -> list[Done]:
    """Return a rank's actions as (kind, stage, microbatch), in the order in which they began."""
    actions = sorted(
        (span for span in rank_profile.spans if span.track == "compute"),
        key=lambda span: span.start,
    )
    return [(span.name, span.stage, span.microbatch) for span in actions]


def _difference(rank: int, planned: list[Done], done: list[Done]) -> str | None:
    for position, (should, did) in enumerate(zip_longest(planned, done)):
        if should != did:
            return (
                f"rank {rank}, action {position}: {_named(did)} where {_named(should)} was planned"
            )
    return None


def _named(action: Done | None) -> str:
    if action is None:
        return "nothing more"
    kind, stage, microbatch = action
    return f"{kind} of stage {stage} and microbatch {microbatch}"
