"""The idle time of pipelines, through the executor: what the tables foretell."""

import pytest
from benchmarks.bubble import MICROBATCHES, RANKS, expected, measure, simple

from meshwright.program.schedule import (
    SCHEDULES,
    compute_tables,
    microbatch_rule,
    stage_ranks,
    with_transfers,
)
from paced import Carried, idle, performed
from ranks import on_ranks

TOLERANCE = 0.04
# Seconds of a stage's third: of a forward, of the gradient of its input, and of its weights.
UNIT_S = 0.1
THIRDS = {"F": 1, "I": 1, "W": 1, "B": 2}


def passes(world, schedule):
    """What the ranks did in a pass of a schedule, by the number of microbatches."""
    virtual = SCHEDULES[schedule].min_virtual
    of_stage = stage_ranks(schedule, RANKS, virtual)
    seconds = {
        (kind, stage): thirds / virtual
        for stage in range(len(of_stage))
        for kind, thirds in THIRDS.items()
    }
    found = {}
    for count in MICROBATCHES:
        if microbatch_rule(schedule, RANKS, virtual, count) is None:
            tables = with_transfers(compute_tables(schedule, RANKS, virtual, count), of_stage)
            found[count] = performed(world, tables, of_stage, count, seconds, Carried())
    return found


@pytest.mark.often(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_executors_idle_time_is_that_of_the_table(schedule):
    by_rank = on_ranks(RANKS, passes, schedule=schedule)
    assert by_rank[0]
    for count in by_rank[0]:
        table = expected(schedule, RANKS, count)
        assert idle([found[count] for found in by_rank]) == pytest.approx(table, abs=1e-9)
        if schedule in ("gpipe", "1f1b"):
            assert table == pytest.approx(simple(RANKS, count))


def measured(world, schedule, microbatches):
    measure(world, schedule, microbatches, 0.001)  # connects the ranks
    return measure(world, schedule, microbatches, UNIT_S)


@pytest.mark.perf
@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("gpipe", 4), ("interleaved_zero_bubble", 8)]
)
def test_measured_idle_time_is_that_of_the_table(schedule, microbatches):
    table = expected(schedule, RANKS, microbatches)
    assert table <= simple(RANKS, microbatches) + 1e-9
    for found in on_ranks(RANKS, measured, schedule=schedule, microbatches=microbatches):
        assert found == pytest.approx(table, abs=TOLERANCE)
