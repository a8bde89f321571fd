"""`--measured`: predictions corrected by what was measured, in as few numbers as that holds."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks import published_left_out, published_pooled

from meshwright.cli.main import main
from meshwright.cost.calibration import Calibration, shipped_calibration
from meshwright.cost.measured import Measurement, correct, corrected
from meshwright.cost.price import price
from meshwright.cost.rows import read_row
from meshwright.cost.systems import SYSTEMS
from meshwright.layout import Layout
from meshwright.planner.plan import cost_inputs_of, explain
from meshwright.runtime.pricing.measured import VARIABLE
from meshwright.spec.loading import load_config
from test_predict_rows import ROW
from test_search import MODEL, setting

WORDS = [
    "model.preset=llama-3-8b",
    "cluster.preset=h100-sxm",
    "train.batch=64",
    "train.seq_len=4096",
    "train.precision=bf16",
]
LAYOUT = "shard8 zero3 mb1 recompute-full"


def predicted(capsys, *words):
    assert main(["plan", *WORDS, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_row_is_one_factor_of_what_is_computed():
    setting = cost_inputs_of(load_config(None, WORDS))
    layout = Layout.parse(LAYOUT)
    plain = explain(setting, layout)
    measured = Measurement(setting, layout, 1.4 * plain.time.total, 1.1 * plain.memory.total)
    found = correct([measured])
    assert found.links == 1
    assert 1.4 <= found.compute < 1.45
    after = explain(replace(setting, calibration=found.applied(setting.calibration)), layout)
    assert after.time.total == pytest.approx(1.4 * plain.time.total, rel=2e-3)
    assert after.memory.total == pytest.approx(1.1 * plain.memory.total, rel=1e-6)
    states = ("weights", "gradients", "optimizer")
    for name in states:
        assert after.memory.by_category()[name] == plain.memory.by_category()[name]
    assert any(
        f"computes at {1 / found.compute:.2f} of the rate that is predicted for h100-sxm" in t
        for t in found.text
    )


def test_intervals_hold_what_they_say_of_sources_left_out():
    """Of sources that are off by numbers of their own, spread evenly: about 80% of their rows."""
    errors = [(f"source {at}", 0.01 * (at + 100 * turn)) for at in range(100) for turn in (-1, 0)]
    low, high = published_left_out.interval(errors)
    assert (low, high) == (pytest.approx(-0.8, abs=0.02), pytest.approx(0.8, abs=0.02))
    assert published_left_out.coverage(errors) == pytest.approx(0.8, abs=0.03)
    # A large source has less to say than as many rows of as many sources.
    many = [*errors, *[("large", 5.0)] * 100]
    assert published_left_out.interval(many)[1] < 1.0


def test_a_tail_is_the_largest_whose_intervals_hold_left_out_sources():
    """Of three sources, those at the ends are outside of what the others say, whatever the tail."""
    even = [(f"source {at}", 0.01 * (at + 100 * turn)) for at in range(100) for turn in (-1, 0)]
    tail = published_left_out.holding(even)
    assert 0.07 <= tail <= 0.1
    assert published_left_out.coverage(even, tail) >= 0.8
    assert published_left_out.interval(even, 0.05) > published_left_out.interval(even, 0.02)
    apart = [(f"source {at}", float(at)) for at in range(3)]
    assert published_left_out.holding(apart) == 0.01


def test_a_row_counts_the_other_sources_that_are_near_it():
    """Of three sources of one system, each has two others; a kind of layout of one has none."""

    def row(source, layout):
        case = SimpleNamespace(setting=nemo(), layout=Layout.parse(layout))
        return SimpleNamespace(source=source, case=case)

    rows = [row("a", "tp2 mb1"), row("b", "tp2 mb1"), row("c", "tp4 mb1"), row("b", "pp2 mb1")]
    assert published_pooled.near_others(rows) == [2, 2, 2, 0]


def nemo():
    return replace(setting(MODEL, 4, "h100-sxm"), system=SYSTEMS["nemo"])


def test_intervals_are_wider_where_few_published_sources_are_near():
    """Steps of NeMo on H100s are published with tp and pp by many, with tp and cp by one."""
    several = price(nemo(), Layout.parse("tp2 pp2 mb1"))
    few = price(nemo(), Layout.parse("tp2 cp2 mb1"))
    find = nemo().calibration.find
    assert several.spread == (find("interval.plain.low"), find("interval.plain.high"))
    assert few.spread == (find("interval.few.low"), find("interval.few.high"))
    assert few.spread[0] < several.spread[0]
    assert few.spread[1] > several.spread[1]
    measured = replace(
        nemo(),
        calibration=Calibration(
            {**nemo().calibration.constants, "nemo.h100.measured.compute": 1.0}, "", ""
        ),
    )
    closer = price(measured, Layout.parse("tp2 cp2 mb1"))
    assert closer.spread[0] > few.spread[0]


def test_the_interval_of_few_sources_is_as_wide_as_left_out_ones_need():
    """Two sources of one error each hold nothing of a third that is far off: the width grows."""
    errors = [
        *[("near", 0.01 * at) for at in range(10)],
        *[("far", 0.3 + 0.01 * at) for at in range(10)],
    ]
    assert published_left_out.coverage(errors) == 0
    low, high = published_left_out.widened(errors)
    assert published_left_out.coverage_widened(errors) == 0.8
    assert low < -0.5 < 0.9 < high


def test_model_states_are_outside_the_interval_of_memory(capsys):
    found = predicted(capsys, "--top", "1")["ledger"]
    states = ("weights", "gathered", "gradients", "optimizer", "communication buffers")
    exact = sum(found["memory_bytes"].get(name, 0) for name in states)
    rest = found["peak_memory_bytes"] - exact
    calibration = shipped_calibration()
    bounds = [calibration.find(f"interval.memory.{bound}") for bound in ("low", "high")]
    assert 0 < exact < found["peak_memory_interval_bytes"][0]
    assert found["peak_memory_interval_bytes"] == pytest.approx([exact + b * rest for b in bounds])


def test_a_measurement_draws_the_interval_in(capsys):
    before = predicted(capsys, "--top", "1")["ledger"]
    typed = f"layout={before['label']} step={before['step_time_s']}s"
    after = predicted(capsys, "--top", "1", "--no-keep", "--measured", typed)["ledger"]
    widths = []
    for one in (before, after):
        low, high = one["step_time_interval_s"]
        assert low < one["step_time_s"] < high
        widths.append((high - low) / one["step_time_s"])
    assert widths[1] < widths[0]


def rows_of_a_slower_cluster(compute, links):
    truth = shipped_calibration()
    of = {"megatron.a100.measured.compute": compute, "megatron.a100.measured.links": links}
    truth = replace(truth, constants={**truth.constants, **of})
    for tp, pp, mbs in ((1, 8, 1), (8, 1, 2), (2, 4, 1), (8, 2, 2), (4, 4, 1), (1, 4, 2)):
        row = {**ROW, "tp": tp, "pp": pp, "mbs": mbs}
        case = read_row(row, shipped_calibration())
        setting = replace(case.setting, calibration=truth)
        yield Measurement(case.setting, case.layout, price(setting, case.layout).time.total)


def test_rows_that_separate_them_give_links_their_own_factor():
    (found,) = corrected(rows_of_a_slower_cluster(1.3, 2.5), shipped_calibration())
    assert (found.compute, found.links) == (pytest.approx(1.3, 0.05), pytest.approx(2.5, 0.15))
    assert found.after < found.before / 5
    (plain,) = corrected(rows_of_a_slower_cluster(1.3, 1.0), shipped_calibration())
    assert (plain.compute, plain.links) == (pytest.approx(1.3, 0.02), 1.0)


@pytest.mark.slow
def test_a_typed_measurement_corrects_a_plan_and_is_kept(capsys, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    before = predicted(capsys, "--top", "1")
    label, seconds = before["ledger"]["label"], before["ledger"]["step_time_s"]
    typed = [f"layout={label}", f"step={1.5 * seconds}s"]
    after = predicted(capsys, "--top", "3", "--no-keep", "--measured", *typed)
    same = next(one for one in after["ranked"] if one["label"] == label)
    assert same["step_time_s"] == pytest.approx(1.5 * seconds, rel=2e-3)
    (told,) = after["measured"]
    assert told["kept"] is None
    assert math.log(told["compute"]) > 0.3
    assert predicted(capsys, "--top", "1")["ledger"]["step_time_s"] == seconds

    kept = predicted(capsys, "--top", "1", "--measured", " ".join(typed))
    assert kept["measured"][0]["kept"].endswith("h100-sxm.toml")
    again = predicted(capsys, "--top", "1")
    assert again["ledger"]["step_time_s"] == pytest.approx(kept["ledger"]["step_time_s"], rel=1e-5)
    assert "plan --measured" in again["calibration"]["source"]
    # A second measurement replaces the first: it does not come on top of it.
    twice = predicted(capsys, "--top", "1", "--measured", " ".join(typed))
    assert twice["measured"][0]["compute"] == pytest.approx(told["compute"], rel=1e-2)
    other = ["cluster.preset=a100-80gb", "--top", "1"]
    assert "plan --measured" not in predicted(capsys, *other)["calibration"]["source"]
    assert main(["plan", *WORDS, "--top", "1", "--measured", *typed]) == 0
    assert "measured: from 1 step time: this cluster computes" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["layout=shard8 zero3 mb1"], "needs a layout, and step, memory or a log"),
        (["layout=shard8 zero3 mb1 step=fast"], "'fast' is not a time"),
        (["layout=shard8 zero3 mb1 step=9000h"], "that is not an efficiency"),
        (["layout=shard8 tp3 zero3 mb1 step=2s"], "tp"),
        (["no-such-run"], "neither a run folder, nor a file of rows"),
    ],
)
def test_what_is_no_measurement_is_refused(words, why, capsys):
    assert main(["plan", *WORDS, "--measured", *words]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_rows_correct_rows_of_their_system_and_device(tmp_path, capsys):
    rows, one, out = (tmp_path / name for name in ("rows.jsonl", "one.jsonl", "out.jsonl"))
    others = [ROW, {**ROW, "id": "other", "framework": "torchtitan", "precision": "bf16"}]
    rows.write_text("".join(json.dumps(row) + "\n" for row in others))

    def steps(*more):
        assert main(["predict", "--rows", str(rows), "--out", str(out), *more]) == 0
        return [json.loads(line)["step_time_s"] for line in out.read_text().splitlines()]

    plain = steps()
    one.write_text(json.dumps({**ROW, "step_time_s": 1.2 * plain[0]}) + "\n")
    found = steps("--measured", str(one))
    assert found == [pytest.approx(1.2 * plain[0], rel=2e-3), plain[1]]
    assert "measured:" in capsys.readouterr().out
    # Of another system than ours, a row says nothing of what `plan` prices.
    assert main(["plan", *WORDS, "--measured", str(one)]) == 2
    assert "megatron.a100, but the plan is for meshwright.h100" in " ".join(
        capsys.readouterr().err.split()
    )


def linear_rows(sources):
    """Rows of steps that take as many seconds as their system's `moves`, and one more."""
    rows = [(source, system, seconds) for source, system, seconds in sources for _ in range(4)]
    return published_pooled.Linear(
        tuple(source for source, _, _ in rows),
        np.array([seconds for _, _, seconds in rows]),
        np.array([2.0 for _ in rows]),
        tuple({f"{system}.moves": 1.0} for _, system, _ in rows),
        {f"{system}.moves": 1.0 for _, system, _ in rows},
        {f"{system}.moves": (0.1, 10.0) for _, system, _ in rows},
    )


def test_constants_of_systems_are_pooled():
    """More so the more it costs to differ; a system without a source has what others share."""
    near = linear_rows([("one", "fms", 4.0), ("two", "jax", 4.0), ("three", "composer", 2.0)])
    prior = Calibration({"any.moves": 1.0})
    spread = []
    for strength in (0.01, 1.0, 100.0):
        fitted = published_pooled.pooled(near, "", strength, prior)
        values = [fitted.find("moves", system) for system in ("composer", "fms", "jax", "nemo")]
        assert values[0] <= values[3] <= values[1] == pytest.approx(values[2])
        spread.append(values[1] - values[0])
    assert spread == sorted(spread, reverse=True)
    assert spread[0] == pytest.approx(2.0, abs=0.3)
    unseen = published_pooled.pooled(near, "three", 1.0, prior)
    assert unseen.find("moves", "composer") == unseen.find("moves", "nemo") > 1.2
