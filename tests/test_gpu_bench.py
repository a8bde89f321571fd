"""The benchmark for one GPU, tried on a CPU with a tiny model."""

import time

from benchmarks.gpu import Bench, page, prove, train


def test_a_shape_is_measured_beside_what_was_predicted():
    bench = Bench("cpu", True, time.monotonic() + 300, "h200")
    train(bench, [])
    (row,) = bench.done["training"]
    assert row["flops_per_s"] > 0
    assert row["predicted_peak_bytes"][0] / row["peak_bytes"][0] - 1 < 0.05
    found = {"command": "make gpu", "date": "2026-01-01", "seconds": 1.0, "skipped": ["a: b"]}
    text = page(found | {"proofs": [{"of": "x", "passed": 1, "failed": 0}]} | bench.done, "h200")
    assert "989 TFLOP/s" in text
    assert f"| tiny | 2 | 64 | eager | {row['tokens_per_s']:,.0f} |" in text
    assert text.endswith("| `x` | 1 | 0 |\n\n- left out: a: b\n")


def test_what_fails_or_has_no_time_is_told():
    bench = Bench("cuda", True, time.monotonic() + 300, "h200")
    prove(bench)
    assert bench.done["proofs"] == []
    told = "prove train.precision=fp32: exit code 2: meshwright prove: --device cuda needs a GPU"
    assert bench.skipped[0].startswith(told)
    late = Bench("cpu", True, time.monotonic(), "h200")
    assert late.run("anything", "doctor") is None
    assert late.skipped == ["anything: no time left"]
