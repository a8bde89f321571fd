"""Traces in the format of Chrome and Perfetto."""

import json
from dataclasses import replace

import pytest

from meshwright.cost.profile import predicted_profile
from meshwright.layout import Layout
from meshwright.planner.plan import cost_inputs_of, on_cluster
from meshwright.program.profile import MemoryPoint, RankProfile, Span, StepProfile
from meshwright.report.trace import chrome_trace
from meshwright.spec.loading import load_config

NANOSECOND = 1e-3


def planned(label):
    words = ["cluster.preset=h100-sxm", "train.precision=bf16", "model.n_layers=8"]
    layout = Layout.parse(label)
    return predicted_profile(on_cluster(cost_inputs_of(load_config(None, words)), layout), layout)


def complete(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def check(trace):
    """Hold a trace against the rules of the format."""
    json.dumps(trace, allow_nan=False)
    named = set()
    threads = {}
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
        else:
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert ("thread_name", event["pid"], event["tid"]) in named
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
        if event["ph"] == "C":
            assert all(isinstance(size, int) for size in event["args"].values())
    for events in threads.values():
        open_ends = []
        for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + NANOSECOND / 2:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + NANOSECOND / 2
            open_ends.append(end)


@pytest.mark.parametrize("label", ["pp4 zbv v2 mb1 tp2 sp", "shard4 zero3 mb1"])
def test_a_planned_step_is_a_legal_trace_with_all_its_actions(label):
    profile = planned(label)
    trace = chrome_trace([profile])
    check(trace)
    spans = [span for one in profile.ranks for span in one.spans]
    assert len(complete(trace)) == len(spans)
    last = max(event["ts"] + event["dur"] for event in complete(trace))
    assert last == pytest.approx(profile.step_time_s * 1e6, abs=1)
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert len(counters) == sum(len(one.memory) for one in profile.ranks)
    highest = max(sum(event["args"].values()) for event in counters)
    assert highest == max(one.peak.total for one in profile.ranks)


def test_an_action_says_what_it_is():
    spans = (
        Span("compute", "F", 0.001, 0.003, 0, 3),
        Span("messages", "all_gather", 0.002, 0.003, 0, 3, "tp", 64),
        Span("messages", "all_reduce", 0.004, 0.005, axis="data"),
        Span("host", "update", 0.005, 0.006),
    )
    found = StepProfile("measured", {}, "pp2", "cpu", (RankProfile(1, {"pp": 1}, (1,), spans),), 7)
    trace = chrome_trace([replace(found, source="predicted", step=None), found])
    check(trace)
    first = next(event for event in complete(trace) if event["pid"] == 2)
    assert first == {
        "name": "F stage 0 microbatch 3",
        "cat": "compute",
        "ph": "X",
        "pid": 2,
        "tid": 300,
        "ts": 1000.0,
        "dur": 2000.0,
        "args": {"stage": 0, "microbatch": 3},
    }
    names = [event["name"] for event in complete(trace) if event["pid"] == 1]
    assert names[1:] == ["all_gather tp stage 0 microbatch 3", "all_reduce data", "update"]
    told = [event["args"].get("name") for event in trace["traceEvents"] if event["ph"] == "M"]
    assert {"planned: pp2", "measured: pp2, step 7", "rank 1, stage 1: messages"} <= set(told)


def test_messages_that_overlap_take_threads_of_their_own():
    spans = tuple(Span("messages", "recv", start, start + 2.0) for start in (0.0, 1.0, 2.0, 2.5))
    within = Span("messages", "all_reduce", 0.5, 1.5, axis="tp")
    found = StepProfile("measured", {}, "x", "cpu", (RankProfile(0, {}, (), (*spans, within)),))
    trace = chrome_trace([found])
    check(trace)
    threads = {event["ts"]: event["tid"] for event in complete(trace)}
    assert threads == {0.0: 100, 0.5e6: 100, 1e6: 101, 2e6: 100, 2.5e6: 102}


def test_memory_without_times_is_left_out():
    memory = (MemoryPoint("F 0 0", None, {"parameters": 8}),)
    found = StepProfile("simulated", {}, "x", "cpu", (RankProfile(0, {}, (), (), memory),))
    assert [event["ph"] for event in chrome_trace([found])["traceEvents"]] == ["M", "M"]
