"""Rows of measurements: what is predicted of them, and how well, over published ones."""

import json
import os
import re
import statistics
from collections import Counter
from pathlib import Path

import pytest
from benchmarks import published
from benchmarks.published_fit import fit, fit_memory
from benchmarks.published_left_out import unfitted

from meshwright.cost.calibration import Calibration, shipped_calibration
from meshwright.cost.row_words import system_of
from meshwright.cost.rows import RowError, predict_row, read_row
from meshwright.planner.plan import plan
from meshwright.spec.loading import load_config

ROWS = Path(
    os.environ.get("MESHWRIGHT_PUBLISHED", Path(__file__).parents[3] / "shared" / "published")
)
needs_rows = pytest.mark.skipif(
    not (ROWS / "rows.jsonl").is_file(), reason="the published measurements are missing"
)
ROW = {
    "id": "one",
    "gpu": "A100-80GB",
    "n_gpus": 64,
    "framework": "Megatron-LM",
    "model": "GPT",
    "layers": 48,
    "hidden": 6144,
    "heads": 48,
    "vocab": 51200,
    "seq": 2048,
    "gbs": 256,
    "mbs": 2,
    "tp": 8,
    "pp": 2,
    "recompute": "full",
    "precision": "fp16",
}


def test_a_row_is_predicted_whatever_was_measured():
    found = predict_row(ROW, shipped_calibration())
    keys = {"id", "fits", "peak_mem_gib", "worst_rank", "step_time_s", "tokens_per_s_per_gpu"}
    intervals = {"step_time_interval_s", "peak_mem_interval_gib"}
    assert set(found) == keys | intervals | {"tflops_per_gpu", "mfu", "assumed", "evidence"}
    assert "source" in found["evidence"]
    low, high = found["peak_mem_interval_gib"]
    assert low < found["peak_mem_gib"] < high
    assert found["fits"] is True
    assert 0.3 < found["mfu"] < 0.6
    measured = {"step_time_s": 1.0, "status": "oom", "oom": True, "mfu": 0.1, "peak_mem_gib": 1}
    assert predict_row({**ROW, **measured}, shipped_calibration()) == found
    json.dumps(found)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layers": None}, "lacks layers"),
        ({"tp": 7}, "does not divide n_gpus"),
        ({"gpu": "TPUv4"}, "not in the catalogue"),
        ({"task": "LoRA"}, "lacks lora_rank"),
        ({"lora_rank": 8, "lora_targets": ["linear_qkv"]}, "not a linear layer"),
        ({"lora_rank": 8, "experts": 8, "topk": 2, "moe_ffn": 64}, "experts"),
        ({"gbs": 3}, "not a multiple"),
        ({"seq": "long"}, "valid integer"),
        ({"precision": "fp8"}, "cannot be read"),
    ],
)
def test_rows_that_say_too_little_are_refused(change, why):
    assert why in predict_row({**ROW, **change}, shipped_calibration())["refused"]


def seconds(**change):
    """Return the predicted seconds of the step of a row with these changes."""
    return predict_row({**ROW, **change}, shipped_calibration())["step_time_s"]


def test_what_is_null_is_absent():
    assert seconds(zero_stage=None, dp=None, sp=None, vp=None) == seconds()


def test_a_pipeline_with_fewer_microbatches_than_stages_is_mostly_idle():
    """Each further microbatch adds the time of the slowest stage, of eight of nearly that time."""
    alone, two, four = (seconds(gbs=16 * count, mbs=2, pp=8, tp=1) for count in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - alone), rel=1e-6)
    assert 6 < alone / (two - alone) < 8


def test_a_system_and_a_device_have_their_names_links_and_kernels():
    assert seconds(gpu="NVIDIA L40S") == seconds(gpu="L40S-48GB")
    # Tensor parallelism suffers from PCIe, the pipeline hardly
    slowdowns = [
        seconds(gpu="NVIDIA L40S", **layout) / seconds(**layout)
        for layout in ({}, {"tp": 1, "pp": 16, "mbs": 1})
    ]
    assert slowdowns[0] > 1.5 * slowdowns[1]
    # An H800 is an H100 with slower NVLink: the same products, a slower sum over tp
    nemo = {"framework": "NeMo", "pp": 4, "recompute": None}
    h100, h800 = (seconds(gpu=gpu, **nemo) for gpu in ("H100-80GB", "H800-80GB"))
    assert h100 < h800 < 1.5 * h100
    assert seconds(gpu="H800-80GB", **nemo, tp=1) == pytest.approx(
        seconds(gpu="H100-80GB", **nemo, tp=1), rel=0.05
    )


def test_what_a_row_leaves_out_is_said():
    row = {key: value for key, value in ROW.items() if key not in ("mbs", "precision")}
    assumed = read_row(row, shipped_calibration()).assumed
    assert {"microbatch 1", "precision bf16"} <= set(assumed)
    with pytest.raises(RowError):
        read_row({}, shipped_calibration())


def test_accuracy_is_counted_right(tmp_path):
    rows = []
    for number, mbs in enumerate((1, 2, 4, 8, 1, 2, 4, 8)):
        row = {**ROW, "id": str(number), "mbs": mbs, "pp": 1 + number // 4}
        found = predict_row(row, shipped_calibration())
        rows.append(row | {"status": "ok", "tier": "A", "source_key": "own", "group": "g"})
        rows[-1]["step_time_s"] = found["step_time_s"] * 2
    rows.append({**ROW, "status": "oom", "tier": "A", "source_key": "own"})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured, refused = published.read(path, shipped_calibration())
    assert not refused
    stated = [one for one in measured if published.is_stated(one)]
    errors = published.time_errors(stated, shipped_calibration())
    assert list(errors.values()) == pytest.approx([-0.5] * 8)
    (ranking,) = published.rankings(stated, errors)
    assert (ranking.layouts, ranking.loss, ranking.correlation) == (8, 0.0, pytest.approx(1))
    verdicts = published.verdicts(measured, shipped_calibration())
    assert (verdicts.total, len(verdicts.dangerous)) == (9, 1)


def test_a_source_that_is_left_out_leaves_no_constants():
    shipped = shipped_calibration()
    kept = unfitted(shipped)
    assert kept.constants == {n: v for n, v in shipped.constants.items() if n.startswith("any.")}
    assert kept.find("products.bf16", "h100") == shipped.constants["any.products.bf16"]


def made(path, truth):
    """Write rows that a device with known constants would have measured; two sources in turns."""
    rows = []
    for layers, dim in ((24, 2048), (48, 6144), (32, 4096)):
        for tp, pp, mbs in ((1, 1, 1), (8, 1, 2), (2, 4, 1), (8, 2, 2), (4, 4, 1), (1, 8, 2)):
            for more in (1, 2):
                sizes = {"layers": layers, "hidden": dim, "heads": dim // 128}
                row = {**ROW, **sizes, "tp": tp, "pp": pp, "mbs": mbs * more}
                row |= {"id": str(len(rows)), "source_key": ("one", "other")[len(rows) % 2]}
                rows.append(row | {"status": "ok", "tier": "A"})
                rows[-1]["step_time_s"] = predict_row(row, truth)["step_time_s"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_a_fit_predicts_what_it_has_not_seen(tmp_path):
    """Of a device whose products reach other shares of its peak than any that is known."""
    shipped, path = shipped_calibration(), tmp_path / "rows.jsonl"
    slow = {"a100.products.fp16": 0.5, "a100.inner.share": 0.4}
    made(path, Calibration({**shipped.constants, **slow}))
    rows, _ = published.read(path, shipped)
    seen, left = ([one for one in rows if one.source == source] for source in ("one", "other"))
    before = unfitted(shipped)
    guessed = published.time_errors(left, before).values()
    found = published.time_errors(left, fit(seen, before, 3)).values()
    assert statistics.median(map(abs, guessed)) > 0.2
    assert statistics.median(map(abs, found)) < 0.03
    assert max(map(abs, found)) < 0.15


def rows_and_stated(calibration):
    """All published rows, and those that state their step time and layout."""
    rows, _ = published.read(ROWS / "rows.jsonl", calibration)
    return rows, [one for one in rows if published.is_stated(one)]


@pytest.mark.slow
@needs_rows
def test_the_shipped_constants_are_those_of_the_rows():
    """They were fitted to these very rows: it says that they belong to the formulas, no more."""
    calibration = shipped_calibration()
    rows, stated = rows_and_stated(calibration)
    assert len(stated) > 800
    errors = published.time_errors(stated, calibration)
    assert statistics.median(map(abs, errors.values())) < 0.06
    swept = [one for one in rows if one.source == "hagemann2023"]
    verdicts = published.verdicts(swept, calibration)
    assert verdicts.total > 700
    assert verdicts.right >= 0.97
    assert max(verdicts.dangerous.values()) < 0.02


PLANS = {
    "dense": ["model.preset=llama-2-7b", "cluster.preset=a100-80gb", "train.batch=64"],
    "grouped": ["model.preset=llama-3-8b", "cluster.preset=h100-sxm", "train.batch=32"],
    "plain": ["model.preset=pythia-1b", "cluster.preset=a40", "train.batch=64"],
    "adapters": [
        *("model.preset=llama-3-8b", "cluster.preset=h100-sxm", "train.batch=32"),
        *("lora.rank=16", 'lora.targets=["q_proj", "down_proj"]'),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANS)
def test_a_row_of_ones_own_has_the_price_of_plan(kind):
    words = [*PLANS[kind], "train.seq_len=2048", "train.precision=bf16"]
    config = load_config(None, words)
    made = plan(config, 20)
    model, train = config.model, config.train
    assert len(made.found.ranked) > 5
    for one in made.found.ranked:
        layout = one.layout
        row = {
            "id": layout.label,
            "gpu": config.cluster.preset,
            "n_gpus": layout.world,
            "layers": model.n_layers,
            "hidden": model.dim,
            "heads": model.n_heads,
            "kv_heads": model.n_kv_heads,
            "ffn": model.ffn_dim,
            "mlp": "gated" if model.family == "llama" else "plain",
            "rotary_pct": model.rotary_pct,
            "parallel_residual": model.parallel_residual,
            "vocab": model.vocab_size,
            "seq": train.seq_len,
            "gbs": train.batch,
            "mbs": layout.microbatch,
            "dp": layout.dp,
            "dp_shard": layout.dp_shard,
            "tp": layout.tp,
            "sp": layout.sp,
            "cp": layout.cp,
            "cp_kind": layout.cp_kind,
            "pp": layout.pp,
            "vp": layout.virtual_stages,
            "pp_schedule": layout.schedule,
            "zero_stage": layout.zero,
            "recompute": layout.recompute,
            "offload": layout.offload,
            "precision": "bf16",
        }
        if model.lora is not None:
            row |= {"lora_rank": model.lora.rank, "lora_targets": list(model.lora.targets)}
        found = predict_row(row, shipped_calibration())
        assert "system meshwright" in found["assumed"]
        assert found["step_time_s"] == pytest.approx(one.time.total, rel=1e-9), layout.label
        assert found["peak_mem_gib"] * 2**30 == pytest.approx(one.memory.total, rel=1e-9)
        assert found["mfu"] == pytest.approx(one.mfu, rel=1e-9)
        if kind == "dense":  # its MLP is seen by its width
            alone = predict_row({**row, "mlp": None}, shipped_calibration())
            assert alone["step_time_s"] == found["step_time_s"]
            assert "mlp gated" in alone["assumed"]


def test_systems_by_their_names():
    text = (Path(__file__).parents[2] / "docs/commands/predict.md").read_text()
    table = text.partition("priced as |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    assert len(rows) == 11
    for names, priced in rows[:-1]:
        for name in re.findall(r"`([^`]+)`", names):
            system = system_of({"framework": name}, [])
            assert system.name == re.findall(r"`([^`]+)`", priced)[0], name
    assert system_of({"framework": "other", "tp": 2}, []).name == "megatron"
    assert system_of({}, []).name == "meshwright"
    with_kind = {**ROW, "mlp": "moe"}
    assert "one of gated, plain" in predict_row(with_kind, shipped_calibration())["refused"]


@pytest.mark.slow
@needs_rows
def test_a_published_source_is_predicted_from_the_others():
    """Each of the four large ones by constants that were fitted without it; see docs/records."""
    shipped = shipped_calibration()
    rows, stated = rows_and_stated(shipped)
    sizes = Counter(one.source for one in stated)
    errors = {}
    for source, _ in sizes.most_common(4):
        left = [one for one in stated if one.source == source]
        kept = [one for one in stated if one.source != source]
        found = published.time_errors(left, fit(kept, unfitted(shipped), 2))
        assert statistics.median(map(abs, found.values())) < 0.22, source
        errors |= found
    assert len(errors) > 700
    assert statistics.median(map(abs, errors.values())) < 0.18
    ranked = published.rankings((one for one in stated if one.name in errors), errors)
    assert statistics.fmean(one.loss for one in ranked) < 0.08
    assert statistics.median(one.correlation for one in ranked) > 0.85

    swept = "hagemann2023"
    others = [one for one in published.says_of_memory(rows) if one.source != swept]
    constants = fit_memory(others, unfitted(shipped), 2)
    verdicts = published.verdicts((one for one in rows if one.source == swept), constants)
    assert verdicts.total > 700
    assert verdicts.right > 0.87


def test_a_prediction_says_how_many_sources_are_near():
    """Of a system and a device that nobody published a step of, none."""
    row = {**ROW, "framework": "Megatron-LM", "gpu": "A100-80GB"}
    said = predict_row(row, shipped_calibration())["evidence"]
    assert re.search(
        r"near this: [1-9]\d* sources? of megatron, [1-9]\d* of devices priced like a100, ", said
    )
    said = predict_row({**row, "gpu": "RTX 4090"}, shipped_calibration())["evidence"]
    assert ", 0 of devices priced like l40s, " in said
    alone = predict_row({**row, "tp": 1, "pp": 1}, shipped_calibration())["evidence"]
    assert alone.endswith("of data parallelism alone")
