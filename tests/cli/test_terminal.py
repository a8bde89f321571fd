"""Charts of plain characters, 80 columns wide."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from meshwright.cli import main
from meshwright.cost.profile import predicted_profile
from meshwright.layout import Layout
from meshwright.planner.plan import cost_inputs_of, on_cluster
from meshwright.program.profile import MemoryPoint, RankProfile, Span, StepProfile
from meshwright.report.terminal import causes_chart, memory_chart, summary, timeline_chart
from meshwright.spec.loading import load_config

GIB = 2**30
WORDS = ["cluster.preset=h100-sxm", "train.precision=bf16", "train.batch=16", "model.n_layers=8"]


def drawn():
    """Two stages: F F B B on the first of 10 seconds, with the second in between."""
    first = [("F", 0, 0, 2), ("F", 1, 2, 4), ("B", 0, 6, 8), ("B", 1, 8, 10)]
    second = [("F", 0, 2, 3), ("B", 0, 3, 6), ("F", 1, 6, 7), ("B", 1, 7, 8)]
    ranks = []
    for place, actions in enumerate((first, second)):
        spans = tuple(Span("compute", k, a, b, place, m) for k, m, a, b in actions)
        memory = (MemoryPoint("F", 1.0, {"parameters": GIB, "activations": (place + 1) * GIB}),)
        causes = {"compute": 8.0, "bubble": 2.0} if not place else {"compute": 6.0, "bubble": 4.0}
        ranks.append(RankProfile(2 * place, {"pp": place}, (place,), spans, memory, (), causes))
    return StepProfile(
        "predicted", {}, "pp2 tp2", "toy", tuple(ranks), step_time_s=12.0, memory_limit=4 * GIB
    )


def test_a_timeline_has_a_line_for_each_place():
    chart = timeline_chart(drawn(), 27).plain.splitlines()
    assert chart == [
        "planned: actions 10.0s of a step of 12.0s, idle 30.0%"[:27],
        "rank 0 FFFFFFFF....BBBBBBBB",
        "rank 2 ....FFBBBBBBFFBB....",
        "       0 s            10.0s",
        "       F forward, B backward, . waiting"[:27],
    ]


def test_causes_stand_beside_each_other():
    one = drawn()
    slower = replace(one, source="measured", step=5)
    chart = causes_chart([one, slower], 50).plain.splitlines()
    assert [line.split() for line in chart[1:]] == [
        ["compute", "planned", "#" * 13, "7.0s", "70.0%"],
        ["measured", "#" * 13, "7.0s", "70.0%"],
        ["bubble", "planned", "#" * 6, "3.0s", "30.0%"],
        ["measured", "#" * 6, "3.0s", "30.0%"],
    ]


def test_memory_stands_against_the_limit():
    chart = memory_chart([drawn()], 60).plain.splitlines()
    assert chart[0] == "tensor peak; 4.00 GiB is the limit"
    first, second = (line[line.index("[") + 1 : line.index("]")] for line in chart[1:])
    assert first.count("#") == pytest.approx(len(first) / 2, abs=1)
    assert second.count("#") == pytest.approx(len(second) * 3 / 4, abs=1)
    assert chart[2].startswith("rank 2")
    assert chart[2].endswith("3.00 GiB, mostly activations")


@pytest.mark.parametrize("label", ["pp8 zbv v2 mb1", "pp16 1f1b mb1 tp2", "shard2 zero3 mb1"])
def test_all_of_it_fits_in_80_columns_and_has_no_colour_in_a_file(label):
    layout = Layout.parse(label)
    words = [*WORDS, "model.n_layers=32"]
    profile = predicted_profile(
        on_cluster(cost_inputs_of(load_config(None, words)), layout), layout
    )
    out = io.StringIO()
    Console(file=out, width=80).print(summary([profile, replace(profile, source="measured")]))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in out.getvalue()
    assert sum(line.startswith("rank 0 ") for line in lines) == 3  # two timelines, memory
    # Bars and names of a profile's chart do not wrap: each line says something of its own.
    assert all(line == "" or line.split() for line in lines)


def test_of_many_ranks_the_first_and_the_last_are_drawn():
    (one, _) = drawn().ranks
    ranks = tuple(replace(one, rank=at, coordinates={"pp": at}) for at in range(40))
    chart = timeline_chart(replace(drawn(), ranks=ranks)).plain.splitlines()
    assert [line.split()[0] for line in chart].count("rank") == 16
    assert "..." in chart
    assert any(line.startswith("rank 39 ") for line in chart)


def test_what_is_not_known_is_not_drawn():
    empty = StepProfile("simulated", {}, "x", "cpu", (RankProfile(0, {}),))
    assert summary([empty]).plain == ""


def test_a_plan_explained_shows_its_timeline(capsys):
    assert main(["plan", *WORDS, "--explain", "pp4 1f1b mb1"]) == 0
    shown = capsys.readouterr().out
    assert "rank 3 ...." in shown
    assert "bubble" in shown
    assert "80.00 GiB is the limit" in shown
    assert main(["plan", *WORDS, "--explain", "dp4 mb1"]) == 0
    shown = capsys.readouterr().out
    assert ". waiting" not in shown
    assert "80.00 GiB is the limit" in shown
