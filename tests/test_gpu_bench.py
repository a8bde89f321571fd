"""The benchmark for one GPU, tried on a CPU with a tiny model."""

import json
import time

import pytest
from benchmarks.gpu import (
    LARGE_4K,
    SMALL_8K,
    TINY,
    calibrate,
    has_failed,
    layers_within,
    main,
    prove,
    recalculate,
    train,
)
from benchmarks.gpu_bench import Bench, document
from benchmarks.gpu_page import page
from benchmarks.syncs import CASES

from meshwright.predict.calibration import as_toml

# Two blocks (four products of 64 x 64, three of 64 x 128, two norms), vocabulary twice, last norm.
TINY_WEIGHTS = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * 128 * 64 + 64


def bench_of(tmp_path, device="cpu", seconds=300.0):
    out, text = tmp_path / "gpu.json", tmp_path / "gpu.md"
    return Bench(device, True, time.monotonic() + seconds, "h200", out, text)


def test_a_shape_is_measured_beside_what_was_predicted(tmp_path):
    bench = bench_of(tmp_path)
    bench.attempt("train", lambda: train(bench, LARGE_4K, "eager"))
    assert bench.skipped == []
    (row,) = json.loads(bench.out.read_text())["training"]
    assert row["flops_per_s"] > row["causal_flops_per_s"] > 0
    assert row["predicted_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.05)
    # fp32 weights, their gradients and both moments of AdamW are there at once.
    assert row["peak_bytes"][0] > 16 * TINY_WEIGHTS
    assert f"| tiny | 2 | 64 | eager | {row['tokens_per_s']:,.0f} |" in bench.page.read_text()
    assert "989 TFLOP/s" in bench.page.read_text()
    (tmp_path / "here.toml").write_text(as_toml({"cpu": {"overhead.step": 9.0}}, "", ""))
    bench.calibrations.append(tmp_path / "here.toml")
    recalculate(bench)
    (row,) = bench.done["training"]
    assert row["calibrated_step_time_s"] > 9 > row["predicted_step_time_s"]
    assert f"| {row['calibrated_step_time_s']:.4f} s (+" in page(bench.found())


@pytest.mark.slow  # test_measuring_gpus has the calibration, the test above what it prices
def test_what_is_measured_of_the_device_prices_what_was_trained(tmp_path):
    bench = bench_of(tmp_path)
    calibrate(bench, TINY, tmp_path / "gpu-tiny.toml")
    assert bench.skipped == []
    (found,) = bench.done["devices"]
    assert found["constants"]["peak.bf16"] > 0
    assert "measured of the GPU, blocks of tiny, 64 tokens" in page(bench.found())
    assert bench.calibrations == [tmp_path / "gpu-tiny.toml"]


def test_what_fails_or_has_no_time_is_told(tmp_path):
    bench = bench_of(tmp_path, "cuda")
    prove(bench, ["train.precision=fp32"])
    assert bench.done["proofs"] == []
    (skip,) = bench.skipped
    assert skip.what == "prove train.precision=fp32"
    assert skip.why.startswith("exit code 2: meshwright prove: --device cuda needs a GPU")
    assert skip.said[-1] in skip.why
    assert f"- left out: {skip.what}: {skip.why}\n" in page(bench.found())
    late = bench_of(tmp_path, seconds=0)
    assert late.run("anything", "doctor") is None
    assert late.skipped == [("anything", "no time left", [])]
    assert has_failed(bench.done, ["checks"])
    assert has_failed(bench.done, ["train"])
    assert not has_failed(bench.done, ["device"])


def test_what_raises_takes_nothing_else_with_it(tmp_path):
    bench = bench_of(tmp_path)
    bench.done["proofs"].append({"of": "x", "passed": 1, "failed": 0})
    bench.attempt("odd", lambda: {}["missing"])
    bench.run_module("words", "this")  # prints a poem, and ends well
    assert [skip.what for skip in bench.skipped] == ["odd", "words"]
    assert "KeyError: 'missing'" in bench.skipped[0].why
    assert "The Zen of Python, by Tim Peters" in bench.skipped[1].said
    assert json.loads(bench.out.read_text())["skipped"][0]["said"][-1] == "KeyError: 'missing'"
    assert "| `x` | 1 | 0 |" in bench.page.read_text()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a":\n 1}', {"a": 1}),
        ('[Gloo] Rank 0 is connected\n{"a": 1}\n', {"a": 1}),
        ("", None),
        ("no JSON\nat all", None),
        ("1", None),
    ],
)
def test_the_document_of_a_command_is_all_of_it_or_its_last_line(text, found):
    assert document(text) == found


def test_layers_are_as_many_as_are_predicted_to_fit():
    words = ["train.precision=bf16", "train.compile=true"]
    sizes = [layers_within(room * 2**30, LARGE_4K, words, "mb2") for room in (20, 100, 132)]
    assert sizes == sorted(sizes)
    assert 20 <= sizes[-1] < LARGE_4K.layers
    assert layers_within(132 * 2**30, SMALL_8K, words, "mb2") == SMALL_8K.layers
    assert layers_within(1, SMALL_8K, words, "mb2") == 1


def test_every_case_of_syncs_has_a_name_of_its_own():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.slow
@pytest.mark.timeout(570)
def test_the_whole_of_it(tmp_path):
    words = ["--device", "cpu", "--tiny", "--out", str(tmp_path / "gpu.json")]
    assert main([*words, "--page", str(tmp_path / "gpu.md")]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["skipped"] == []
    assert {len(found[part]) for part in ("training", "devices")} == {1}
    assert [row["failed"] for row in found["proofs"]] == [0, 0]
    assert "calibrated_step_time_s" in found["training"][0]
    assert (tmp_path / "gpu-tiny.toml").is_file()
