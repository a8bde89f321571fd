"""Timelines: every action, the bubble, the middle folded, and the same actions aligned."""

from dataclasses import replace
from itertools import pairwise

import plotly.graph_objects as go
import pytest

from meshwright.cost.profile import predicted_profile
from meshwright.layout import Layout
from meshwright.planner.plan import cost_inputs_of, on_cluster
from meshwright.report.page import Page
from meshwright.report.record import read_run
from meshwright.report.run_page import run_page
from meshwright.report.timelines import (
    MOST_SPANS,
    Fold,
    aligned,
    fold_of,
    panels,
    timeline_chart,
    timelines,
)
from meshwright.spec.loading import load_config
from run_folders import write_run
from test_report import PIPELINE


def test_the_timeline_has_every_action_and_marks_the_bubble(config):
    run = read_run(write_run(config(*PIPELINE, "layout.dp_replicate=1")))
    page = run_page(run)
    figure, _ = page.figures["timeline"]
    hovers = [text for trace in figure["data"] for text in trace["hovertext"]]
    for name in ("F forward", "B backward"):
        assert sum(name in text for text in hovers) == 2 * 2 * 8
    assert sum("idle for" in text for text in hovers) > 2
    assert any("waits: recv along pp, 4.00 KiB" in text for text in hovers)
    headings = [one["text"] for one in figure["layout"]["annotations"]]
    assert [h.partition("</b>")[0] for h in headings] == ["<b>Planned", "<b>Measured"]
    assert all(f"idle {run.planned.idle:.1%}" in h for h in headings)
    # The planned panel lies above the measured one, and both share one axis of time.
    layout = figure["layout"]
    assert layout["yaxis"]["domain"][0] > layout["yaxis2"]["domain"][1]
    assert "xaxis2" not in layout
    # What is hatched is what no rank computes in.
    idle = [t for t in figure["data"] if t["name"] == "idle"]
    work = [t for t in figure["data"] if t["name"] in ("F", "B")]
    for y in ("y", "y2"):
        gaps = sum(sum(t["x"]) for t in idle if t["yaxis"] == y)
        busy = sum(sum(t["x"]) for t in work if t["yaxis"] == y)
        assert gaps / (gaps + busy) == pytest.approx(run.planned.idle)


def actions(figure, y="y"):
    """Where each action of a panel is drawn, by row, kind and microbatch."""
    return {
        (row, trace["name"], text): (start, start + width)
        for trace in figure["data"]
        if trace["yaxis"] == y and "text" in trace
        for row, text, start, width in zip(
            trace["y"], trace["text"], trace["base"], trace["x"], strict=True
        )
    }


@pytest.fixture(scope="module")
def large():
    """A predicted step with 8 stages and 256 microbatches: some 14,000 spans."""
    words = ["cluster.preset=h100-sxm", "cluster.nodes=2", "train.precision=bf16"]
    words += ["train.batch=512", "model.n_layers=16"]
    layout = Layout.parse("shard2 zero1 pp8 1f1b mb1")
    return predicted_profile(on_cluster(cost_inputs_of(load_config(None, words)), layout), layout)


@pytest.mark.slow
def test_a_plan_draws_all_stages_with_the_middle_folded(large):
    """Rank 0 stood alone for all of them."""
    assert sum(len(one.spans) for one in large.ranks) > MOST_SPANS
    page = Page("", "")
    html = timeline_chart(page, [large])
    (figure,) = page.figures["timeline"]
    go.Figure(figure)
    assert len(figure["layout"]["yaxis"]["ticktext"]) == 8
    assert "represents others" not in html
    assert "is folded" in html
    drawn = actions(figure)
    for row in range(8):
        numbers = {int(text) for at, _, text in drawn if round(at + 0.05) == row}
        assert {*range(8), *range(248, 256)} <= numbers
        assert not numbers & set(range(100, 150))
    assert sum(len(trace["x"]) for trace in figure["data"]) < MOST_SPANS
    # The gap is marked, nothing lies in it, and times on its right are those of the step.
    (box,) = [one for one in figure["layout"]["shapes"] if one["type"] == "rect"]
    assert box["label"]["text"] == "folded"
    edges = [(s, e) for s, e in drawn.values() if e > s]
    assert all(e <= box["x0"] * 1.000001 or s >= box["x1"] * 0.999999 for s, e in edges)
    axis = figure["layout"]["xaxis"]
    hidden = float(axis["ticktext"][-1]) - axis["tickvals"][-1]
    assert axis["range"][1] == pytest.approx(large.step_time_s * 1e3 - hidden)
    assert hidden > large.step_time_s * 1e3 / 2


def test_a_fold_cuts_what_reaches_into_it():
    fold = Fold(10.0, 90.0, 2.0)
    assert fold.place(1.0, 9.0) == (1.0, 9.0)
    assert fold.place(8.0, 40.0) == (8.0, 10.0)
    assert fold.place(30.0, 60.0) is None
    assert fold.place(60.0, 95.0) == (12.0, 17.0)
    assert fold.place(5.0, 95.0) == (5.0, 17.0)
    assert fold.place(91.0, 95.0) == (13.0, 17.0)


def test_the_same_actions_begin_at_the_same_place_where_they_are_aligned(config):
    run = read_run(write_run(config(*PIPELINE, "layout.dp_replicate=1"), slower=1.5))
    both = timelines(panels([run.planned, run.measured]))
    plain, shown = both["in time"], both["the same actions aligned"]
    go.Figure(shown)
    assert actions(plain, "y").keys() == actions(shown, "y").keys()
    ours, theirs = actions(shown, "y"), actions(shown, "y2")
    assert [ours[key][0] for key in ours] == pytest.approx([theirs[key][0] for key in ours])
    plain_ours, plain_theirs = actions(plain, "y"), actions(plain, "y2")
    assert any(plain_ours[key][0] != plain_theirs[key][0] for key in plain_ours)
    for figure in (plain, shown):  # an action keeps its length
        (one, *_), (other, *_) = (list(actions(figure, y).values()) for y in ("y", "y2"))
        assert (other[1] - other[0]) / (one[1] - one[0]) == pytest.approx(1.5)
    for row in range(2):  # no two actions of a row lie over each other
        places = sorted(at for key, at in theirs.items() if round(key[0] + 0.05) == row)
        assert all(a[1] <= b[0] * 1.000001 for a, b in pairwise(places))


def test_rows_that_did_other_actions_are_not_aligned(config):
    run = read_run(write_run(config(*PIPELINE, "layout.dp_replicate=1")))
    first, *others = run.measured.ranks
    swapped = [
        span._replace(microbatch=7 - span.microbatch) if span.track == "compute" else span
        for span in first.spans
    ]
    other = replace(run.measured, ranks=(replace(first, spans=tuple(swapped)), *others))
    assert aligned(panels([run.planned, other])) is None
    assert aligned(panels([run.planned])) is None
    assert fold_of(panels([run.planned])) is None
