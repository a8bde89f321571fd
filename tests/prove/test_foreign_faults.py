"""The count of faults in other systems, and of right cases that are accused."""

from benchmarks.foreign_faults import asked, has_failed, page, summary
from benchmarks.other_trainers_cases import case, cases, is_healthy
from benchmarks.seeded_faults import FAULTS

PASSED = {"passed": True, "refused": None, "faults": [], "compared": 7}


def row(verdict, **more):
    return {**case("torch", "llama", {"tp": 2}), "verdict": {**PASSED, **verdict}, **more}


def accused(kind):
    return {"passed": False, "faults": [{"kind": kind, "sentence": "the gradient is"}]}


def test_enough_is_asked():
    """At least 30 faults and 60 cases without one, none of which is known to be wrong."""
    seeded = [one for one in asked() if "seeded" in one]
    healthy = [one for one in asked() if "seeded" not in one]
    assert len(seeded) == len(FAULTS) >= 30
    assert len(healthy) >= 60
    assert all(map(is_healthy, seeded))
    assert {one["system"] for one in healthy} >= {one["system"] for one in seeded}
    assert len({fault.kind for fault in FAULTS.values()}) >= 13


def test_what_is_known_to_be_wrong_is_not_healthy():
    def is_right(family, layout, microbatches):
        return is_healthy(case("transformers", family, layout, microbatches))

    assert is_right("qwen3", {"tp_size": 2}, 1)
    assert not is_right("qwen3", {"tp_size": 2}, 2)
    assert is_right("qwen3", {"fsdp_size": 2, "tp_size": 2}, 2)
    assert not is_right("apertus", {"fsdp_size": 2, "tp_size": 2}, 1)
    assert is_right("apertus", {"fsdp_size": 2}, 2)
    assert not is_healthy(case("torchtitan", "llama3", {"dp_replicate": 2}))
    assert sum(not is_healthy(one) for one in cases()) < 20


def test_rows_are_counted():
    named = row(accused("missing sum"), seeded="router's gradient partial")
    misnamed = row(accused("scaled"), seeded="never reduced")
    passing = row({}, seeded="halved")
    raising = {**case("torch", "llama", {"tp": 2}), "crashed": "KeyError: 3"}
    rows = [named, misnamed, row({}), row(accused("scaled")), raising]
    assert summary([*rows, passing]) == (
        "1 of 3 faults are named with their kind, and 1 pass. 1 of 2 cases without a fault are "
        "accused; 1 more raise or are not compared.\n"
    )
    text = page(rows, "One run.")
    assert "router's gradient partial | missing sum | missing sum |" in text
    accusing = "llama: wrong: scaled: the gradient is"
    assert f"| torch | tp=2 | 2 | llama | {accusing} | llama: raises: KeyError: 3 |" in text


def test_a_fault_that_passes_or_a_right_case_that_is_accused_fails():
    named = row(accused("missing sum"), seeded="router's gradient partial")
    assert not has_failed([named, row({})])
    assert has_failed([named, row({}, seeded="halved")])
    assert has_failed([named, row(accused("scaled"))])
