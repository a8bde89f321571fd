"""`SCHEDULES`: the pipeline schedules, their properties, and which numbers of microbatches they
allow."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class ScheduleTraits(NamedTuple):
    """The requirements and properties of a pipeline schedule.

    `min_virtual` and `max_virtual` bound the stages per rank (None: no upper bound).
    `splits_backward`: it defers weight gradients. `is_v`: the stages go down the ranks and come
    back up, so that rank 0 holds the first and the last. `holds_all`: a rank holds the activations
    of all microbatches before its first backward.
    """

    name: str
    min_virtual: int
    max_virtual: int | None
    splits_backward: bool
    is_v: bool
    holds_all: bool = False


SCHEDULES: Final[Mapping[str, ScheduleTraits]] = MappingProxyType(
    {
        traits.name: traits
        for traits in (
            ScheduleTraits("naive", 1, 1, splits_backward=False, is_v=False),
            ScheduleTraits("gpipe", 1, 1, splits_backward=False, is_v=False, holds_all=True),
            ScheduleTraits("1f1b", 1, 1, splits_backward=False, is_v=False),
            ScheduleTraits("interleaved_1f1b", 2, None, splits_backward=False, is_v=False),
            ScheduleTraits(
                "looped_bfs", 2, None, splits_backward=False, is_v=False, holds_all=True
            ),
            ScheduleTraits("interleaved_zero_bubble", 2, None, splits_backward=True, is_v=False),
            ScheduleTraits("zbv", 2, 2, splits_backward=True, is_v=True),
            ScheduleTraits("dualpipev", 2, 2, splits_backward=True, is_v=True),
        )
    }
)


def microbatch_rule(schedule: str, pp: int, virtual_stages: int, microbatches: int) -> str | None:
    """Return the rule on stages and microbatches that a schedule breaks, as a sentence with
    numbers, or None.

    `microbatches` is the number of a data-parallel rank in a step. A single stage (`pp` and
    `virtual_stages` 1) is legal with every schedule. Refuses what the schedules of
    torch.distributed.pipelining 2.13 refuse, too.
    """
    traits = SCHEDULES.get(schedule)
    if traits is None:
        return f"schedule {schedule!r} must be one of {', '.join(SCHEDULES)}"
    if microbatches < 1:
        return f"a pipeline of {pp} ranks needs at least 1 microbatch, but has {microbatches}"
    if pp == virtual_stages == 1:
        return None
    fewest, limit = traits.min_virtual, traits.max_virtual
    if virtual_stages < fewest or (limit is not None and virtual_stages > limit):
        word = "exactly" if fewest == limit else "at least"
        return (
            f"schedule {schedule} needs {word} {_count(fewest, 'virtual stage')} on each of the "
            f"{_count(pp, 'rank')} of the pipeline, but layout.virtual_stages = {virtual_stages}"
        )
    return _rule_of_count(schedule, pp, virtual_stages, microbatches)


def _rule_of_count(schedule: str, pp: int, virtual_stages: int, microbatches: int) -> str | None:
    stages = pp * virtual_stages
    if schedule in ("1f1b", "dualpipev") and microbatches < stages:
        return (
            f"schedule {schedule} needs at least as many microbatches as the pipeline has stages: "
            f"{_count(microbatches, 'microbatch', 'microbatches')}, {_count(stages, 'stage')}"
        )
    # Rounds of pp microbatches or a few more, all of one size (Narayanan et al.,
    # arXiv:2104.04473, section 2.2, wants a multiple of pp).
    rounds = max(1, microbatches // pp)
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and microbatches % rounds:
        return (
            f"schedule {schedule} runs {microbatches} microbatches on {pp} ranks in {rounds} "
            f"rounds, and {rounds} must divide {microbatches}"
        )
    return None


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
