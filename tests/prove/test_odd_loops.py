"""`watch` on unusual loops: right ones are not accused, and wrong ones that look like them are."""

import pytest

from odd_loops import LOOPS, run_odd
from ranks import on_ranks

RANKS = {"hybrid shards that sum": 4}
# Right loops that cannot be compared, and what the refusal says.
REFUSED = {
    "sharded logits": "outputs that ranks share out",
    "shared positions": "communicates between ranks that read different inputs",
    "shared positions, no reference": "the model's own modules communicate",
}
NOTED = {"divided after the backward": "divided after the backward, by 105 in step 1"}
FAULTS = [
    ("divided after the backward", "local targets", "local token count", ""),
    ("divided after the backward", "head not divided", "scaled", "head.weight is 105 times"),
    ("hybrid shards that sum", "averaged besides", "scaled", "4 times too small"),
    ("hybrid shards that sum", "a layer averages", "scaled", "4 times too small"),
    ("sharded vocabulary", "no sum", "missing sum", "a sum over all ranks is missing"),
    ("sharded vocabulary", "wrong index", "wrong loss", ""),
]


@pytest.mark.often(2)
@pytest.mark.parametrize("name", LOOPS)
def test_no_right_loop_is_accused(name, tmp_path):
    ranks = RANKS.get(name, 2)
    verdict = on_ranks(ranks, run_odd, name=name, fault=None, folder=tmp_path)[0]
    assert verdict["faults"] == [], verdict
    if name in REFUSED:
        assert REFUSED[name] in verdict["refused"]
    else:
        assert verdict["passed"], verdict["refused"]
        assert verdict["compared"] > 50
    assert NOTED.get(name, "") in " ".join(verdict["notes"])


@pytest.mark.often(2)
@pytest.mark.parametrize(("name", "fault", "kind", "text"), FAULTS)
def test_a_fault_is_named(name, fault, kind, text, tmp_path):
    ranks = RANKS.get(name, 2)
    verdict = on_ranks(ranks, run_odd, name=name, fault=fault, folder=tmp_path)[0]
    assert [f["kind"] for f in verdict["faults"]][:1] == [kind], verdict
    assert text in verdict["faults"][0]["sentence"]
