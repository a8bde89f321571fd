"""Planned and measured steps: the same order on every rank, and the same idle time."""

from dataclasses import replace

import pytest

from meshwright.cost.profile import predicted_profile
from meshwright.layout import Layout
from meshwright.planner.plan import cost_inputs_of, on_cluster
from meshwright.program.lower import lower
from meshwright.program.profile import RankProfile, StepProfile
from meshwright.report.agreement import agreement
from meshwright.report.terminal import summary
from meshwright.spec.loading import load_config
from paced import Carried, Slept, idle, performed
from ranks import on_ranks

WORDS = [
    *("model.dim=256", "model.n_layers=12", "model.n_heads=8", "model.n_kv_heads=4"),
    *("train.seq_len=256", "train.batch=8"),
]
POINTS, POINTS_SLEPT = 0.01, 5
# How long the actions of a step that is slept take together on a rank.
LENGTH_S = 2.5


def planned(label):
    layout = Layout.parse(label)
    found = on_cluster(cost_inputs_of(load_config(None, WORDS)), layout)
    return predicted_profile(found, layout), lower(
        found.model, found.train, found.optimizer, layout
    )


def as_planned(world, label, seconds=None):
    """Perform a rank's part of a plan, and return when it did what.

    It sleeps for the planned times, stretched to so many seconds, or passes them on its own clock.
    """
    plan, program = planned(label)
    scale = 1.0 if seconds is None else seconds / plan.step_time_s
    mine = plan.ranks[world.rank].spans
    took = {(s.name, s.stage): scale * s.seconds for s in mine if s.track == "compute"}
    sent = max(span.seconds for span in mine if span.name in ("SEND_F", "SEND_B"))
    clock = Carried(sent) if seconds is None else Slept()
    return performed(world, program.tables, program.stage_ranks, program.microbatches, took, clock)


LABELS = ("pp4 1f1b mb1", "pp4 interleaved_1f1b v2 mb1", "pp4 interleaved_zero_bubble v2 mb1")


@pytest.mark.parametrize("label", LABELS)
def test_four_stages_go_as_planned(label):
    plan, _ = planned(label)
    ranks = tuple(on_ranks(4, as_planned, label=label))
    found = agreement(plan, StepProfile("measured", {}, label, "cpu", ranks))
    assert found.difference is None
    assert 0.05 < found.planned < 0.4
    assert abs(found.points) < POINTS
    assert found.measured == pytest.approx(idle(ranks))


@pytest.mark.perf
@pytest.mark.parametrize("label", LABELS)
def test_four_stages_that_sleep_go_as_planned(label):
    plan, _ = planned(label)
    on_ranks(4, as_planned, label=label, seconds=0.05)  # connects the ranks
    ranks = tuple(on_ranks(4, as_planned, label=label, seconds=LENGTH_S))
    found = agreement(plan, StepProfile("measured", {}, label, "cpu", ranks))
    assert found.difference is None
    assert abs(found.points) < POINTS_SLEPT
    works = [span for one in ranks for span in one.spans]
    length = max(span.end for span in works) - min(span.start for span in works)
    assert length == pytest.approx(LENGTH_S, rel=0.2)


def test_the_first_difference_is_named():
    plan, _ = planned("pp4 1f1b mb1")
    measured = replace(plan, source="measured", step=3)
    assert agreement(plan, measured).words.startswith("every rank did its actions in the planned")
    second = plan.ranks[1]
    work = [span for span in second.spans if span.track == "compute"]
    swapped = [work[1]._replace(start=work[0].start), work[0]._replace(start=work[1].start)]
    changed = replace(second, spans=(*swapped, *work[2:]))
    found = agreement(plan, replace(measured, ranks=(plan.ranks[0], changed, *plan.ranks[2:])))
    assert found.difference == (
        "rank 1, action 0: F of stage 1 and microbatch 1 where F of stage 1 and microbatch 0 was "
        "planned"
    )
    cut = replace(second, spans=tuple(work[:-1]))
    found = agreement(plan, replace(measured, ranks=(cut,)))
    assert found.difference.startswith(f"rank 1, action {len(work) - 1}: nothing more where B of")
    assert found.points is None  # of one rank there is no bubble


def test_what_agrees_is_said_beside_the_charts():
    plan, _ = planned("pp4 1f1b mb1")
    later = [
        replace(one, spans=tuple(s._replace(start=s.start * 2, end=s.end * 2) for s in one.spans))
        for one in plan.ranks
    ]
    measured = replace(plan, source="measured", ranks=tuple(later))
    text = summary([plan, measured]).plain
    assert "0.0 points more" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert agreement(plan, replace(measured, ranks=(RankProfile(0, {"pp": 0}),))) is None
