"""The one schema of predicted, simulated and measured steps."""

import json

import pytest

from meshwright.program.profile import (
    MemoryPoint,
    RankProfile,
    Span,
    StepProfile,
    Traffic,
    from_json,
    of_source,
    to_json,
)


def profile(source="measured"):
    """Two stages; the second one waits half of the time."""
    first = RankProfile(
        0,
        {"pp": 0},
        (0,),
        (Span("compute", "F", 1.0, 2.0, 0, 0), Span("compute", "B", 3.0, 5.0, 0, 0)),
        (
            MemoryPoint("F 0 0", 1.5, {"parameters": 10, "activations": 5}),
            MemoryPoint("B 0 0", 4.0, {"parameters": 10}),
        ),
        (Traffic("send", "pp", 64, 1, 0.5),),
        {"compute": 3.0, "bubble": 1.0},
    )
    second = RankProfile(
        1, {"pp": 1}, (1,), (Span("messages", "recv", 1.0, 3.0), Span("compute", "F", 2.0, 4.0))
    )
    return StepProfile(source, {"pp": 2}, "pp2", "two cores", (first, second), step=3)


def test_a_profile_goes_through_json_unchanged():
    text = json.dumps(to_json([profile(), profile("predicted")]))
    assert from_json(json.loads(text)) == (profile(), profile("predicted"))


def test_the_bubble_is_what_no_rank_computes_in():
    # From 1 to 5 on two ranks: 3 + 2 seconds of work in 8.
    assert profile().idle == pytest.approx(3 / 8)
    alone = StepProfile("measured", {}, "one", "cpu", profile().ranks[:1])
    assert alone.idle is None


def test_the_worst_rank_is_among_those_whose_memory_is_known():
    assert profile().worst.rank == 0
    assert profile().worst.peak == MemoryPoint("F 0 0", 1.5, {"parameters": 10, "activations": 5})
    assert to_json([profile()])["ledgers"][0]["peak_memory_bytes"] == 15


def test_the_last_profile_of_a_source_counts():
    assert of_source([profile("predicted"), profile()], "predicted").source == "predicted"
    assert of_source([profile()], "simulated") is None


def test_another_schema_is_refused():
    with pytest.raises(ValueError, match="schema 2 is not the known one, 1"):
        from_json({"schema": 2, "ledgers": []})
