"""A layout has one peak and one time, wherever they are shown: ranking, explanation, JSON, page."""

import json
from dataclasses import replace

import pytest

from meshwright.cli.main import main
from meshwright.cost.peak import peak
from meshwright.cost.price import brief, memories, memory, price, worst_memory
from meshwright.cost.profile import predicted_profile
from meshwright.cost.timeline import timeline
from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES
from meshwright.planner.plan import cost_inputs_of, on_cluster, plan, prediction_json
from meshwright.planner.rank import MARGIN
from meshwright.program.lower import lower
from meshwright.prove.matrix import matrix
from meshwright.report.causes import mean_causes
from meshwright.spec.loading import load_config

SMALL = ("model.preset=llama-3-8b", "cluster.preset=h100-sxm")
LARGE = ("model.preset=llama-3-70b", "cluster.preset=h100-sxm", "cluster.nodes=8")


def cases(world):
    config = load_config(None, ("model.dim=64", "model.n_layers=8"))
    for case in matrix(world):
        if case.refused is None:
            found = replace(cost_inputs_of(config), model=case.model, train=case.train)
            yield replace(on_cluster(found, case.layout), packed=case.packed), case.layout


def check_one_number(found, layout):
    """The price of a layout against the profile that charts, pages and ledgers are made of."""
    one, profile = price(found, layout), predicted_profile(found, layout)
    document = prediction_json(one)
    worst = profile.worst
    assert document["peak_memory_bytes"] == worst.peak.total, layout.label
    assert document["worst_rank"] == worst.rank
    held = one.memory.by_category()
    for ours, theirs in (
        ("gradients", "gradients"),
        ("weights", "parameters"),
        ("gathered", "gathered"),
        ("communication buffers", "buffers"),
        ("optimizer", "optimizer"),
    ):
        assert held.get(ours, 0) == worst.peak.bytes.get(theirs, 0), (layout.label, ours)
    assert document["step_time_s"] == profile.step_time_s
    assert (document["tokens_per_s"], document["mfu"]) == (profile.tokens_per_s, profile.mfu)
    shown = mean_causes(profile)
    for cause, seconds in document["seconds"].items():
        assert shown.get(cause, 0.0) == pytest.approx(seconds, rel=1e-9), (layout.label, cause)
    assert sum(document["seconds"].values()) == pytest.approx(one.time.total, rel=1e-9)
    return one


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_price_is_what_its_profile_shows(world):
    for found, layout in list(cases(world))[::3]:
        check_one_number(found, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["8b", "70b"]
)
def test_every_layout_of_a_ranking_is_explained_by_its_numbers(words):
    made = plan(load_config(None, words), top=4)
    assert len(made.found.ranked) == 4
    limit = made.setting.cluster.device.memory * (1 - MARGIN)
    for ranked in made.found.ranked:
        explained = check_one_number(made.setting, ranked.layout)
        assert prediction_json(explained) == prediction_json(ranked)
        assert ranked.memory.total <= limit
        assert ranked.memory == max(memories(made.setting, ranked.layout), key=lambda m: m.total)


def test_no_layout_is_ranked_whose_walk_does_not_fit():
    """By closed forms this one took 73 GiB of 80, by its program 104: a buffer for each stage."""
    words = (*LARGE[:2], "cluster.nodes=64", "train.batch=1024")
    found = cost_inputs_of(load_config(None, words))
    layout = Layout.parse("dp2 shard16 zero2 tp2 sp cp2-ring pp4 interleaved_1f1b v20 mb1")
    assert not worst_memory(found, layout).fits
    assert not brief(found, layout, 0).fits


@pytest.mark.slow
def test_the_command_prints_one_peak_and_one_bubble(capsys):
    """In the ranking, in its JSON, and in the terms and the chart of the explanation."""
    setup = [*LARGE[:2], "cluster.nodes=1", "layout.pp=2", "layout.tp=4", "layout.microbatch=1"]
    setup[0] = SMALL[0]
    assert main(["plan", *setup, "--top", "1", "--json"]) == 0
    (ranked,) = json.loads(capsys.readouterr().out)["ranked"]
    label = ranked["label"]
    assert main(["plan", *setup, "--explain", label, "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    for key in set(ranked) - {"why"}:
        assert explained[key] == ranked[key], key
    assert sum(size for _, size, _ in explained["terms"]) == pytest.approx(
        ranked["peak_memory_bytes"]
    )
    shown = f"{ranked['peak_memory_bytes'] / 2**30:.2f} GiB"
    assert main(["plan", *setup, "--top", "1"]) == 0
    assert shown in capsys.readouterr().out
    assert main(["plan", *setup, "--explain", label]) == 0
    printed = capsys.readouterr().out
    assert shown in printed  # the bar
    assert f"{ranked['seconds']['bubble']:.4f}" in printed


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_peak_found_soon_is_that_of_the_whole_timeline(world):
    for found, layout in list(cases(world))[::2]:
        program = lower(found.model, found.train, found.optimizer, layout, found.target)
        for rank in {0, layout.world - 1}:
            assert peak(program, rank) == timeline(program, rank).peak, (layout.label, rank)


@pytest.mark.often(6)
@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("zero", ["shard2 zero1", "shard2 zero2", "shard2 zero3"])
def test_the_worst_rank_of_all_is_found_at_the_ends_of_those_alike(name, zero):
    """And a step of few microbatches holds about as much: what a search goes by."""
    virtual = SCHEDULES[name].min_virtual
    stages = f" v{virtual}" if virtual > 1 else ""
    layout = Layout.parse(f"{zero} pp8 {name}{stages} mb1")
    words = ("model.preset=llama-3-8b", "cluster.preset=h100-sxm", "cluster.nodes=2")
    found = cost_inputs_of(load_config(None, (*words, "train.batch=96")))
    every, worst = memories(found, layout), worst_memory(found, layout)
    assert worst.total == max(one.total for one in every)
    for one in every:
        assert brief(found, layout, one.rank).total == pytest.approx(one.total, rel=0.05)


@pytest.mark.often(6)
@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("policy", ["zero2 mb1", "zero3 mb1 recompute-full", "zero0 mb1"])
def test_more_microbatches_than_are_walked_hold_no_more(name, policy):
    virtual = SCHEDULES[name].min_virtual
    stages = f" v{virtual}" if virtual > 1 else ""
    data = "dp2" if policy.startswith("zero0") else "shard2"
    label = f"{data} {policy.removeprefix('zero0 ')} pp4 {name}{stages}"
    layout = Layout.parse(label)
    words = ("model.preset=llama-3-8b", "cluster.preset=h100-sxm", "cluster.nodes=1")
    found = cost_inputs_of(load_config(None, (*words, "train.batch=128")))
    assert layout.microbatches(128) == 64
    whole = lower(found.model, found.train, found.optimizer, layout, found.target)
    for rank in range(layout.pp):
        walked = peak(whole, layout.mesh.rank({"pp": rank}))
        assert memory(found, layout, rank).allocated == walked.total, (label, rank)
