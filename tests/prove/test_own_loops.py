"""`watch` on loops that people write themselves: nothing right is accused, faults are named."""

import pytest

from own_loops import LOOPS, run_loop
from ranks import on_ranks

# Right loops that cannot be compared, and what the refusal says.
REFUSED = {
    "stages numbered from 0": "parts of one model",
    "stages with names of their own": "parts of one model",
    "flat buffers": "flat buffers, as Megatron-Core",
    "own updates": "the script updates by hand",
    "several evaluations": "the weights change without a step",
}
# What the notes of a right loop name as not compared.
NOTED = {
    "encoder and head": "the norm is not compared",
    "two optimizers": "the norm is not compared: the run clips several times a step",
    "scaled loss": "a step that the gradient scaler skipped is not compared",
    "own clipping": "by the script's own code: the norm is not compared",
    "projected": "the program changes the weights after the optimizer's step",
    "zero redundancy": "updates are compared between ranks only",
}
FAULTS = [
    ("experts by rank", "expert doubled", "scaled"),
    ("experts by rank", "embedding not summed", "missing sum"),
    ("encoder and head", "head doubled", "scaled"),
    ("two optimizers", "second decays again", "replicas differ"),
    ("wrapped parts", "not averaged", "missing average"),
    ("partial window", "last window doubled", "scaled"),
    ("scaled loss", "one rank skips", "replicas differ"),
    ("scaled loss", "clipped before unscaling", "scaled"),
    ("scaled loss", "head doubled", "scaled"),
    ("zero redundancy", "weights drift", "replicas differ"),
    ("parts by rank", "one not broadcast", "replicas differ"),
    ("own clipping", "head left out", "scaled"),
    ("own clipping", "all divided", "scaled"),
    ("closures", "head doubled", "scaled"),
    ("projected", "on one rank", "replicas differ"),
    ("never cleared", "never", "not cleared"),
]


@pytest.mark.often(3)
@pytest.mark.parametrize("name", LOOPS)
def test_no_right_loop_is_accused(name, tmp_path):
    verdict = on_ranks(2, run_loop, name=name, fault=None, folder=tmp_path)[0]
    assert verdict["faults"] == [], verdict
    if name in REFUSED:
        assert REFUSED[name] in verdict["refused"]
    else:
        assert verdict["passed"], verdict["refused"]
        assert verdict["compared"] > 20
    assert NOTED.get(name, "") in " ".join(verdict["notes"])


@pytest.mark.often(3)
@pytest.mark.parametrize(("name", "fault", "kind"), FAULTS)
def test_a_fault_is_named(name, fault, kind, tmp_path):
    verdict = on_ranks(2, run_loop, name=name, fault=fault, folder=tmp_path)[0]
    assert [f["kind"] for f in verdict["faults"]][:1] == [kind], verdict
