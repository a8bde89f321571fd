"""Ranks that get more tokens than others: what predictions, rehearsals and rows make of it."""

import json
import statistics

import pytest
from benchmarks.published_moe import imbalances

from meshwright.cli import main
from meshwright.cost.calibration import shipped_calibration
from meshwright.cost.price import price
from meshwright.cost.rows import predict_row, read_row
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.planner.plan import check_legal, cost_inputs_of
from meshwright.simulate.simulation import simulate
from meshwright.spec.loading import load_config
from test_predict_experts import ROW

WORDS = (
    *("model.family=qwen3_moe", "model.dim=64", "model.n_layers=3", "model.n_heads=4"),
    *("model.n_kv_heads=4", "model.vocab_size=128", "model.experts=8", "model.top_k=3"),
    *("model.expert_ffn_dim=96", "train.batch=16", "train.seq_len=64"),
)
DEFAULT = shipped_calibration().constants["any.experts.imbalance"]


def priced(label, *words):
    return price(cost_inputs_of(load_config(None, [*WORDS, *words])), Layout.parse(label))


def test_time_and_memory_are_those_of_the_busiest_rank():
    even, skewed = (
        predict_row({**ROW, "recompute": "none", "imbalance": f}, shipped_calibration())
        for f in (1, 2)
    )
    assert 1.2 * even["step_time_s"] < skewed["step_time_s"] < 2 * even["step_time_s"]
    assert 1.1 * even["peak_mem_gib"] < skewed["peak_mem_gib"] < 2 * even["peak_mem_gib"]
    few, many = (priced("dp4 ep4 mb2", f"train.imbalance={f}") for f in (1, 2))
    for cause in ("ep", "compute"):
        assert many.time.causes[cause] > few.time.causes[cause]
    assert many.memory.total > 1.1 * few.memory.total
    for label in ("dp4 mb2", "tp4 mb2"):  # each rank has all experts, or a share of each
        alone = [priced(label, f"train.imbalance={f}") for f in (1, 2)]
        assert alone[0].time.total == alone[1].time.total
        assert alone[0].memory.total == alone[1].memory.total


def test_left_out_it_is_what_others_saw_and_forced_balance_has_none():
    even, given, left_out, forced = (
        priced("dp4 ep4 mb2", *words).time.total
        for words in (
            ["train.imbalance=1"],
            [f"train.imbalance={DEFAULT}"],
            [],
            ["train.routing=balanced"],
        )
    )
    assert left_out == given > even == forced


def test_a_rank_gets_no_more_than_there_is():
    """Of 3 experts of a token one of 4 ranks has 2 at most; with all experts all ranks are even."""
    some, more = (priced("dp4 ep4 mb2", f"train.imbalance={f}").time.total for f in (8 / 3, 4))
    assert some == more
    each = [priced("dp4 ep4 mb2", "model.top_k=8", f"train.imbalance={f}") for f in (1, 4)]
    assert each[0].time.total == each[1].time.total


@pytest.mark.slow
def test_a_rehearsal_is_of_the_busiest_rank():
    peaks = []
    for imbalance in (1.0, 1.7):
        words = [*WORDS, "model.n_layers=1", f"train.imbalance={imbalance}"]
        found = simulate(load_config(None, words), Layout.parse("dp2 ep2 mb4"), [0])
        assert found.agrees, found.worst.differences
        rehearsed = found.worst.rehearsal.worst.total
        assert found.worst.timeline.total == pytest.approx(rehearsed, rel=0.025)
        peaks.append(rehearsed)
    assert peaks[1] > 1.15 * peaks[0]


@pytest.mark.parametrize(
    ("routing", "expected", "said"),
    [
        ("forced balance, dropless", 1.0, []),
        ("forced balance (fake balanced gate)", 1.0, []),
        ("token drop", 1.0, []),
        ("balanced", 1.0, []),
        ("natural, sigmoid + bias", DEFAULT, [f"imbalance {DEFAULT:g}"]),
        ("natural (load-balance loss 1.87)", DEFAULT, [f"imbalance {DEFAULT:g}"]),
        (None, 1.0, ["routing balanced"]),
    ],
)
def test_a_row_says_how_its_tokens_are_routed(routing, expected, said):
    case = read_row({**ROW, "routing": routing}, shipped_calibration())
    assert case.setting.imbalance == expected
    assert [one for one in case.assumed if one.split()[0] in ("routing", "imbalance")] == said


def test_a_row_of_ours_is_priced_as_a_plan_and_may_give_its_own():
    ours = {**ROW, "framework": "meshwright", "tp": 1, "ep": 8}
    case = read_row(ours, shipped_calibration())
    assert {"routing learned", f"imbalance {DEFAULT:g}"} <= set(case.assumed)
    assert case.setting.imbalance == DEFAULT
    assert read_row({**ours, "imbalance": 1.1}, shipped_calibration()).setting.imbalance == 1.1
    refused = predict_row({**ours, "imbalance": 0.5}, shipped_calibration())["refused"]
    assert "imbalance 0.5 must be at least 1" in refused
    alone = read_row({**ours, "ep": 1}, shipped_calibration())
    assert alone.setting.imbalance == 1
    assert not any("imbalance" in one for one in alone.assumed)


def test_the_default_explains_what_natural_routing_cost_others():
    found = imbalances(shipped_calibration())
    assert statistics.median(found.values()) == pytest.approx(DEFAULT, abs=0.05)
    assert all(1.15 < one < 1.45 for one in found.values())


def test_a_plan_says_what_it_took(capsys):
    asked = [*WORDS, "layout.ep=2", "layout.dp_replicate=2", "cluster.device=cpu"]
    assert main(["plan", *asked, "--json"]) == 0
    (told,) = (
        one for one in json.loads(capsys.readouterr().out)["choices"] if one["what"] == "experts"
    )
    assert told["key"] == "train.imbalance"
    assert f"gets {DEFAULT:g} x the mean of tokens, by runs of others" in told["text"]
    assert main(["plan", *asked, "train.imbalance=1.5"]) == 0
    assert "gets 1.5 x the mean of tokens, as given" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "rule", "legal"),
    [
        (["train.imbalance=1.5"], "of models with experts", "train.imbalance = 1.0"),
        ([*WORDS, "train.imbalance=2", "train.routing=balanced"], "as many", "train.imbalance"),
    ],
)
def test_an_imbalance_of_nothing_is_refused(words, rule, legal):
    setting = cost_inputs_of(load_config(None, words))
    with pytest.raises(ConfigError, match=rule) as found:
        check_legal(setting, Layout.parse("mb4"))
    assert legal in str(found.value)
