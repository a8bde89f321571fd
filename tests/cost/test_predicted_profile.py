"""The predicted profile: the price drawn, with the engine's own walk of memory beside it."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright.cost import step
from meshwright.cost.price import memory, price
from meshwright.cost.profile import predicted_profile
from meshwright.cost.step import ActionTimes, Pass
from meshwright.cost.systems import SYSTEMS
from meshwright.cost.timeline import timeline
from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES
from meshwright.planner.plan import cost_inputs_of, on_cluster
from meshwright.program.actions import Action
from meshwright.program.collectives import collectives
from meshwright.program.lower import lower
from meshwright.program.profile import MEMORY, from_json, to_json
from meshwright.program.schedule import bubble_fraction
from meshwright.prove.matrix import matrix
from meshwright.spec.loading import load_config

MODEL = ["model.dim=256", "model.n_layers=16", "model.n_heads=8", "model.n_kv_heads=4"]
H100 = ["cluster.preset=h100-sxm", "train.precision=bf16"]


def setting(*words):
    return cost_inputs_of(load_config(None, [*MODEL, *words]))


def predicted(label, *words, **options):
    layout = Layout.parse(label)
    return predicted_profile(on_cluster(setting(*words), layout), layout, **options)


def priced(label, *words):
    layout = Layout.parse(label)
    return price(on_cluster(setting(*words), layout), layout)


def cases(world):
    config = load_config(None, MODEL)
    for case in matrix(world):
        if case.refused is None:
            found = replace(cost_inputs_of(config), model=case.model, train=case.train)
            yield case, on_cluster(found, case.layout)


def check_spans(one, total):
    """Spans follow each other in their track, and waits lie within actions or between them."""
    for track in ("compute", "messages", "host"):
        spans = [span for span in one.spans if span.track == track]
        for before, after in pairwise(spans):
            assert before.end <= after.start + 1e-9 * total
    for span in one.spans:
        assert -1e-9 * total <= span.start < span.end <= total * (1 + 1e-9)
    busy = [(span.start, span.end) for span in one.spans if span.track == "compute"]
    for span in one.spans:
        if span.track != "messages":
            continue
        middle = (span.start + span.end) / 2
        within = any(start < middle < end for start, end in busy)
        assert within == (span.axis not in ("pp", "data")), span


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_spans_end_with_the_price_and_causes_add_up_to_it(world):
    for case, found in cases(world):
        profile = predicted_profile(replace(found, packed=case.packed), case.layout)
        total = price(found, case.layout).time.total
        assert profile.step_time_s == total
        ends = [max(span.end for span in one.spans) for one in profile.ranks]
        assert max(ends) == pytest.approx(total, rel=1e-9), case.label
        program = lower(case.model, case.train, case.optimizer, case.layout)
        for place, one in enumerate(profile.ranks):
            assert sum(one.causes.values()) == pytest.approx(total, rel=1e-9)
            check_spans(one, total)
            done = [
                Action(s.name, s.stage, s.microbatch) for s in one.spans if s.track == "compute"
            ]
            assert tuple(done) == program.compute_tables[place]
            work = sum(span.seconds for span in one.spans if span.track == "compute")
            causes = ("compute", "recompute", "tp", "cp")
            assert work >= sum(one.causes.get(cause, 0.0) for cause in causes) * (1 - 1e-9)


def test_ranks_have_the_causes_of_the_price():
    label = "pp4 1f1b shard2 zero3 tp2 sp mb1 recompute-full"
    time = priced(label, *H100, "train.batch=32").time
    profile = predicted(label, *H100, "train.batch=32")
    for one, causes in zip(profile.ranks, time.ranks, strict=True):
        assert one.causes["data"] == causes["gathers"] + causes["data"]
        assert one.causes["recompute"] == causes["recompute"] > 0
        within = [span for span in one.spans if span.axis == "tp"]
        assert sum(span.seconds for span in within) == pytest.approx(causes["tp"])
    slowest = profile.ranks[time.slowest].causes
    assert slowest["bubble"] == min(one.causes["bubble"] for one in profile.ranks)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_the_bubble_is_that_of_the_table_where_messages_are_free(monkeypatch, name):
    traits = SCHEDULES[name]
    virtual = traits.min_virtual
    monkeypatch.setattr(step, "transfer_seconds", lambda *_: 0.0)
    alike = Pass(1.0, *[0.0] * 6), Pass(2.0, *[0.0] * 6)
    monkeypatch.setattr(ActionTimes, "passes", lambda self, stage: alike)
    monkeypatch.setattr(ActionTimes, "head", 0.0)
    layout = Layout(pp=4, schedule=name, virtual_stages=virtual, microbatch=1)
    found = on_cluster(setting("train.batch=16"), layout)
    program = lower(found.model, found.train, found.optimizer, layout, found.target)
    expected = bubble_fraction(program.compute_tables, program.stage_ranks)
    assert predicted_profile(found, layout).idle == pytest.approx(expected)
    assert expected > 0.02


@pytest.mark.slow
def test_hundreds_of_microbatches_are_drawn_in_full_and_stretched_to_the_price():
    profile = predicted("pp2 1f1b mb1", *H100, "train.batch=64")
    total = priced("pp2 1f1b mb1", *H100, "train.batch=64").time.total
    for one in profile.ranks:
        work = [span for span in one.spans if span.track == "compute"]
        assert len(work) == 128
        seconds = sum(span.seconds for span in work)
        assert seconds == pytest.approx(one.causes["compute"], rel=0.01)
    assert max(span.end for one in profile.ranks for span in one.spans) == pytest.approx(total)


def test_a_receive_is_the_wait_for_it_and_a_send_what_is_waited_for_of_it():
    profile = predicted("pp2 1f1b mb1", *H100)
    first, last = profile.ranks
    wait = next(span for span in last.spans if span.track == "messages")
    assert (wait.name, wait.start, wait.axis) == ("RECV_F", 0.0, "pp")
    sends = [span for span in first.spans if span.name == "SEND_F"]
    assert len(sends) == 16
    assert wait.end == pytest.approx(sends[0].end)  # all of a message is waited for
    assert wait.bytes == sends[0].bytes == next(t for t in first.traffic if t.axis == "pp").bytes


def test_memory_is_the_walk_of_our_engine_with_what_lies_outside():
    words = ("train.batch=16",)
    layout = Layout.parse("pp2 1f1b shard2 zero2 mb2 recompute-selective")
    for more in (words, (*H100, *words)):
        found = on_cluster(setting(*more), layout)
        profile = predicted_profile(found, layout)
        program = lower(found.model, found.train, found.optimizer, layout, found.target)
        for one in profile.ranks:
            walk = timeline(program, one.rank).peak
            terms = memory(found, layout, one.coordinates["pp"]).by_category()
            outside = [terms.get(name, 0) for name in ("context", "communicators")]
            fixed = one.peak.bytes.get("fixed", 0)
            assert one.peak.total == walk.total + fixed
            assert fixed >= sum(outside)
            assert (fixed > 0) == found.traits.runs_ahead
            assert {name for point in one.memory for name in point.bytes} <= set(MEMORY)
            times = [point.time for point in one.memory]
            assert times == sorted(times)
            assert one.memory[0].at == "start"
            assert one.memory[-1].at == "update"
            spans = {f"{s.name} {s.stage} {s.microbatch}": s for s in one.spans}
            for point in one.memory[1:-1]:
                if point.at != "update":
                    assert spans[point.at].start < point.time <= spans[point.at].end
        assert profile.memory_limit == found.cluster.device.memory


def test_messages_are_the_programs_and_their_seconds_those_of_the_price():
    label = "pp2 1f1b shard2 zero3 tp2 sp mb1"
    profile = predicted(label, *H100)
    found = setting(*H100)
    program = lower(found.model, found.train, found.optimizer, Layout.parse(label), found.target)
    for one in profile.ranks:
        sent = sum(each.bytes * each.times for each in one.traffic)
        assert sent == sum(each.bytes * each.count for each in collectives(program, one.rank))
        for axes, cause in ((("tp",), "tp"), (("shard", "replicate", "data"), "data")):
            seconds = sum(each.seconds for each in one.traffic if each.axis in axes)
            assert seconds == pytest.approx(one.causes[cause])
        assert all(each.seconds is None for each in one.traffic if each.axis == "pp")


def test_of_other_systems_the_peak_alone_is_known():
    layout = Layout.parse("pp2 1f1b tp2 mb1")
    found = on_cluster(setting(*H100), layout)
    foreign = replace(found, system=SYSTEMS["megatron-core"])
    profile = predicted_profile(foreign, layout)
    for one in profile.ranks:
        (point,) = one.memory
        assert point.time is None
        assert point.total == pytest.approx(memory(foreign, layout, one.rank // 2).total, abs=9)
        assert not one.traffic
    assert max(s.end for one in profile.ranks for s in one.spans) == pytest.approx(
        price(foreign, layout).time.total
    )


def test_it_goes_through_json_and_takes_the_ranks_it_is_asked_for():
    profile = predicted("pp2 1f1b tp2 mb1", ranks=[3])
    assert from_json(json.loads(json.dumps(to_json([profile])))) == (profile,)
    assert [(one.rank, one.stages) for one in profile.ranks] == [(3, (1,))]
    assert dict(profile.ranks[0].coordinates) == {
        "pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1,
    }  # fmt: skip
